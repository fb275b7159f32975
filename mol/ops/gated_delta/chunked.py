"""Chunk-parallel gated delta rule in PyTorch, differentiable by autograd.

Inside a chunk of C rows that starts from state S_0, with G_t the decay accumulated up to row t,

    u_t = beta_t (v_t - G_t S_0^T k_t - sum_{j<t} G_t/G_j (k_t . k_j) u_j)

is a unit lower-triangular system (I + A) U = diag(beta) (V - diag(G) K S_0): solved once for both
right-hand sides, U = U_0 - W S_0. All chunks of all segments are solved as one batch; only the
state passes through a loop over the chunk's index, batched over the segments that are that long.

Shape suffixes: N packed rows, S segments, M chunks of all segments, C rows a chunk, H heads,
d key width, e value width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mol.ops.gated_delta.naive import compute_dtype, l2norm
from mol.ops.tracing import untraced


@dataclass(frozen=True)
class _Chunks:
    """Chunks ordered by index, then by segment (longest first), so that those of one step of the
    loop lie together and the segments still alive are a prefix."""

    size: int
    counts: list[int]  # chunks at each index
    slot_N: Tensor  # packed row -> row among the M * C padded rows
    segments_S: Tensor  # non-empty segments, longest first


def _chunks(cu_seqlens: Tensor) -> _Chunks:
    """Reads the segment lengths on the host: this form is for the CPU."""
    lengths = cu_seqlens.cpu().long().diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[lengths[order] > 0]
    longest = int(lengths.max())
    # Measured on one CPU thread over 8, 16, 32, 64: short segments waste padded rows in long
    # chunks; at 255 and 2,048 rows 32 is fastest.
    size = 16 if longest <= 128 else 32
    per_segment = (lengths[order] + size - 1) // size
    index = torch.arange(-(-longest // size))
    counts = (per_segment > index[:, None]).sum(1)
    before = counts.cumsum(0) - counts
    rank = torch.empty_like(lengths).index_copy_(0, order, torch.arange(order.numel()))
    segment_N = torch.repeat_interleave(lengths)
    within_N = torch.arange(segment_N.numel()) - (lengths.cumsum(0) - lengths)[segment_N]
    slot_N = (before[within_N // size] + rank[segment_N]) * size + within_N % size
    device = cu_seqlens.device
    return _Chunks(size, counts.tolist(), slot_N.to(device), order.to(device))


@untraced
def chunked_gated_delta_rule(
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
    """Same contract as `gated_delta_rule`; fp64 inputs are computed in fp64, others in fp32."""
    dtype = compute_dtype(q_NHd)
    rows, heads, width = q_NHd.shape
    segments, value_width = cu_seqlens.numel() - 1, v_NHe.shape[-1]
    if state_SHde is None:
        state_SHde = v_NHe.new_zeros(segments, heads, width, value_width, dtype=dtype)
    if rows == 0:
        return torch.zeros_like(v_NHe), state_SHde if final_state else None
    table = _chunks(cu_seqlens)
    size, n_chunks = table.size, sum(table.counts)

    def pad(x_NHx: Tensor) -> Tensor:
        """[N, H, x] -> [M, H, C, x], zeros in the spare rows: they leave the state alone."""
        padded = x_NHx.new_zeros(n_chunks * size, *x_NHx.shape[1:], dtype=dtype)
        padded = padded.index_copy(0, table.slot_N, x_NHx.to(dtype))
        return padded.view(n_chunks, size, *x_NHx.shape[1:]).transpose(1, 2)

    q, k = (t.to(dtype) if unit else l2norm(t.to(dtype)) for t in (q_NHd, k_NHd))
    q, k, v = pad(q * width**-0.5), pad(k), pad(v_NHe)
    beta, decay = pad(beta_NH[..., None]), pad(g_NH[..., None]).cumsum(2)  # decay = log G_t
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: above the diagonal the ratio can overflow.
    ratio_MHCC = (decay - decay.mT).masked_fill(~lower, -torch.inf).exp()
    system = (beta * k @ k.mT * ratio_MHCC).tril(-1)
    grown_k = beta * decay.exp() * k
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, grown_k], -1), upper=False, unitriangular=True
    )
    u_0, w = solved.split([value_width, width], -1)
    last = decay[:, :, -1:]
    step_k, step_decay = (last - decay).exp() * k, last.exp()

    state, states, finals, u = state_SHde.to(dtype)[table.segments_S], [], [], []
    for index, (u_c, w_c, k_c, decay_c) in enumerate(
        zip(*(t.split(table.counts) for t in (u_0, w, step_k, step_decay)), strict=True)
    ):
        alive = table.counts[index]
        finals.append(state[alive:])
        state = state[:alive]
        u.append(u_c - w_c @ state)
        states.append(state)
        state = decay_c * state + k_c.mT @ u[-1]
    u, states = torch.cat(u), torch.cat(states)
    output = (decay.exp() * q) @ states + (q @ k.mT * ratio_MHCC) @ u
    output = output.transpose(1, 2).reshape(-1, heads, value_width)
    output_NHe = output.index_select(0, table.slot_N).to(v_NHe.dtype)
    if not final_state:
        return output_NHe, None
    ended = torch.cat([state, *reversed(finals)])  # longest first again
    return output_NHe, state_SHde.to(dtype).index_copy(0, table.segments_S, ended)
