"""The recurrence, one token at a time: the reference, and the decode step.

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width.
"""

import torch
from torch import Tensor


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64, otherwise fp32: the state accumulates over thousands of steps."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gated_delta_step(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHe: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
    state_NHde: Tensor,
    unit: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token for each of N states: outputs [N, H, e] in v's dtype and the new states."""
    dtype = compute_dtype(q_NHd)
    q, k, v, g, beta = (t.to(dtype) for t in (q_NHd, k_NHd, v_NHe, g_NH, beta_NH))
    if not unit:
        q, k = l2norm(q), l2norm(k)
    q = q * q.shape[-1] ** -0.5
    state = state_NHde * g.exp()[..., None, None]
    u = beta[..., None] * (v - torch.einsum("nhde,nhd->nhe", state, k))
    state = state + k[..., None] * u[..., None, :]
    return torch.einsum("nhde,nhd->nhe", state, q).to(v_NHe.dtype), state


def naive_gated_delta_rule(
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
    """Segment after segment, row after row; see `gated_delta_rule` for shapes."""
    _, heads, width = q_NHd.shape
    zero = v_NHe.new_zeros(1, heads, width, v_NHe.shape[-1], dtype=compute_dtype(q_NHd))
    ends, outputs, states = cu_seqlens.tolist(), [], []
    for segment, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        state = zero if state_SHde is None else state_SHde[segment : segment + 1]
        for row in range(start, end):
            at = slice(row, row + 1)
            output, state = gated_delta_step(
                q_NHd[at], k_NHd[at], v_NHe[at], g_NH[at], beta_NH[at], state, unit
            )
            outputs.append(output)
        states.append(state)
    output_NHe = torch.cat(outputs) if outputs else torch.zeros_like(v_NHe)
    return output_NHe, torch.cat(states) if final_state else None
