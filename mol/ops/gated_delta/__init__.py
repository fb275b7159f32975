"""Gated delta rule over packed segments: one entry, four implementations.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    o_t = d^-0.5 S_t^T q_t

with q and k L2-normalized inside (x / sqrt(sum x^2 + 1e-6)), so callers pass them raw, unless they
say that both are unit vectors already. g is the log of the decay (at most 0), beta the step size.

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width (the state is d x e).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mol.ops.gated_delta.chunked import chunked_gated_delta_rule
from mol.ops.gated_delta.fla import fla_gated_delta_rule
from mol.ops.gated_delta.naive import (
    compute_dtype,
    gated_delta_step,
    l2norm,
    naive_gated_delta_rule,
)
from mol.ops.tracing import has_kernels, untraced

__all__ = [
    "by_fla",
    "chunked_gated_delta_rule",
    "fuses_norm",
    "gated_delta_rule",
    "gated_delta_step",
    "naive_gated_delta_rule",
    "normed_gated_delta_rule",
]

WIDEST_HEAD = 128  # that the project's kernels take
_by_fla: list[bool] = []  # not empty inside `by_fla`


@contextmanager
def by_fla() -> Iterator[None]:
    """Inside, CUDA tensors go to flash-linear-attention's kernels, which the paper used; it has
    to be installed."""
    _by_fla.append(True)
    try:
        yield
    finally:
        _by_fla.pop()


@untraced
def gated_delta_rule(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHe: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
    state_SHde: Tensor | None = None,
    final_state: bool = False,
    unit: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, H, e] in v's dtype and, if asked, the last state of each segment.

    `cu_seqlens` int32 [S + 1]; segments may be empty. States are fp32 (fp64 for fp64 inputs); the
    initial state is zero unless given. `unit`: q and k are L2-normalized. On CUDA the project's
    kernels run, or inside `by_fla` the library's; otherwise the chunked form in PyTorch.
    """
    inputs = q_NHd, k_NHd, v_NHe, g_NH, beta_NH
    others = cu_seqlens, state_SHde, final_state
    if not _kernels_fit(q_NHd, v_NHe):
        return chunked_gated_delta_rule(*inputs, *others, unit)
    if _by_fla:
        return fla_gated_delta_rule(*inputs, *others, unit)
    from mol.ops.kernels.delta import delta_rule

    return delta_rule(*_kernel_inputs(inputs, unit), *others)


def fuses_norm(q_NHd: Tensor, v_NHe: Tensor) -> bool:
    """Whether `normed_gated_delta_rule` takes these tensors here: where no gradients are recorded
    and the project's kernels run."""
    return _kernels_fit(q_NHd, v_NHe) and not _by_fla and not torch.is_grad_enabled()


@untraced
def normed_gated_delta_rule(
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    state_SHde: Tensor | None,
    final_state: bool,
    unit: bool,
    *normed: Tensor | float,
) -> tuple[Tensor, Tensor | None]:
    """`gated_delta_rule` of `inputs`, whose outputs are normed and gated before they are stored:
    [N, H e]. `normed`: gate, weight and epsilon of `mol.ops.glue.gated_norm`."""
    from mol.ops.kernels.delta import gated_delta_rule

    return gated_delta_rule(
        _kernel_inputs(inputs, unit), cu_seqlens, state_SHde, final_state, *normed
    )


def _kernels_fit(q_NHd: Tensor, v_NHe: Tensor) -> bool:
    return has_kernels(v_NHe) and max(q_NHd.shape[-1], v_NHe.shape[-1]) <= WIDEST_HEAD


def _kernel_inputs(inputs: tuple[Tensor, ...], unit: bool) -> tuple[Tensor, ...]:
    """q and k of unit length and in v's precision."""
    q, k, v, *rates = inputs
    if not unit:
        q, k = (l2norm(t.to(compute_dtype(t))) for t in (q, k))
    return q.to(v.dtype), k.to(v.dtype), v, *rates
