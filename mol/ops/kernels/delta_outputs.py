"""The last kernel of the gated delta rule: outputs of all chunks, normed and gated on the way if
no gradients are wanted.

For the math see `mol.ops.kernels.delta`, for norm and gate `mol.ops.kernels.gated_norm`.

Shape suffixes: N packed rows, H heads, e value width, M = H e.
"""

import triton
import triton.language as tl

from mol.ops.kernels.delta_solve import find_chunk, load_rows, load_sums, state_at, store_rows
from mol.ops.kernels.mix_tiles import silu


@triton.jit
def _load_gate(gate, row, end, head, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """A chunk's rows of one head of the gate, which lie STRIDE apart."""
    rows, column = row + tl.arange(0, 64), tl.arange(0, WIDE)
    mask = (rows < end)[:, None] & (column < WIDTH)[None, :]
    at = (rows * STRIDE + head * WIDTH)[:, None] + column[None, :]
    return tl.load(gate + at, mask, other=0.0)


@triton.jit(do_not_specialize=["segments", "batch"])
def outputs(
    q, k, v_new, decay, states, cu_seqlens, o, gate, norm, scale, eps, segments, batch,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_WIDE: tl.constexpr,
    E_WIDE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
):  # fmt: skip
    """O of one chunk of one head; if GATED, its RMSNorm times the norm's weight and SiLU(gate)."""
    head, slot = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row, end, segment = find_chunk(cu_seqlens, slot, segments, SEGMENTS)
    if row >= end:
        return
    q_c = load_rows(q, row, end, head, HEADS, D, 64, D_WIDE)
    k_c = load_rows(k, row, end, head, HEADS, D, 64, D_WIDE)
    v_c = load_rows(v_new, row, end, head, HEADS, E, 64, E_WIDE)
    sums, _ = load_sums(decay, row, end, head, HEADS)
    at, mask = state_at(slot.to(tl.int64), head, 0, D, E, HEADS, D_WIDE, E_WIDE)
    state = tl.load(states + at, mask, other=0.0)
    if GATED:  # read here, so that it arrives during the products
        z = _load_gate(gate, row, end, head, GATE_STRIDE, E, E_WIDE)
        column = tl.arange(0, E_WIDE)
        weight = tl.load(norm + segment // batch * E + column, column < E, other=0.0)
    result = tl.dot(q_c, state, input_precision=PRECISION) * tl.exp(sums)[:, None]
    past = tl.arange(0, 64)[:, None] >= tl.arange(0, 64)[None, :]
    # Masked before exp: above the diagonal the ratio can overflow.
    ratio = tl.exp(tl.where(past, sums[:, None] - sums[None, :], -float("inf")))
    scores = tl.dot(q_c, tl.trans(k_c), input_precision=PRECISION) * ratio
    result += tl.dot(scores.to(v_c.dtype), v_c, input_precision=PRECISION)
    result *= scale
    if GATED:
        result *= tl.rsqrt(tl.sum(result * result, 1) / E + eps)[:, None]
        result *= weight.to(tl.float32)[None, :] * silu(z.to(tl.float32))
    store_rows(o, result, row, end, head, HEADS, E, 64, E_WIDE)
