"""Gated delta rule over packed segments: one entry, three implementations.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    o_t = d^-0.5 S_t^T q_t

with q and k L2-normalized inside (x / sqrt(sum x^2 + 1e-6)), so callers pass them raw, unless they
say that both are unit vectors already. g is the log of the decay (at most 0), beta the step size.

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width (the state is d x e).
"""

import functools
import importlib.util

import torch
from torch import Tensor

from mol.ops.gated_delta.chunked import chunked_gated_delta_rule
from mol.ops.gated_delta.fla import fla_gated_delta_rule
from mol.ops.gated_delta.naive import gated_delta_step, naive_gated_delta_rule
from mol.ops.tracing import untraced

__all__ = [
    "chunked_gated_delta_rule",
    "gated_delta_rule",
    "gated_delta_step",
    "naive_gated_delta_rule",
]


@functools.cache
def _fla_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


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
    initial state is zero unless given. `unit`: q and k are L2-normalized. On CUDA with
    flash-linear-attention installed its kernels run; otherwise the chunked form in PyTorch.
    """
    kernels = q_NHd.is_cuda and q_NHd.dtype != torch.float64 and _fla_installed()
    rule = fla_gated_delta_rule if kernels else chunked_gated_delta_rule
    return rule(q_NHd, k_NHd, v_NHe, g_NH, beta_NH, cu_seqlens, state_SHde, final_state, unit)
