"""What the gated delta rule takes of the projection: convolution, norms and rates (3.2).

The projection comes as its narrow parts (`z.split`), rows of which lie apart: beside the gated
norm a gradient as wide as z would be mostly zeros twice, and adding them costs five passes over
[N, 4 M + 2 H]; joining narrow ones costs three. Sums are fp32, no atomics. Bytes a row in bf16:
12 M, backward 30 M.

Shape suffixes: N packed rows, E blocks, M width, H heads, d = M / H, C = 3 M channels (q, k, v),
J = 4 taps (the last meets the row itself), G = 2 H rates (a, b).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.gated_norm import gated_norm
from mol.ops.kernels.mix_backward import delta_inputs_backward
from mol.ops.kernels.mix_tiles import (
    EPS,
    load_filters,
    shifted,
    sizes_of_heads,
    softplus,
    window,
)
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import block_share, count_parts, row_strided

__all__ = ["delta_inputs", "gated_norm"]

ELEMENTS = 2048  # of a tile, 16 a thread


@triton.jit
def _rates(
    ab, decay_log, dt_bias, g, beta, block, first, last, STRIDE: tl.constexpr, HEADS: tl.constexpr,
    ALL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Log decay and step size of all heads."""
    column = tl.arange(0, ALL)
    inside = column < HEADS
    decay = tl.load(decay_log + block * HEADS + column, mask=inside, other=0.0)
    rate = -tl.exp(decay.to(tl.float32))
    bias = tl.load(dt_bias + block * HEADS + column, mask=inside, other=0.0).to(tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        a = shifted(ab, row, column, STRIDE, mask, 0)
        b = shifted(ab, row, column + HEADS, STRIDE, mask, 0)
        at = row[:, None] * HEADS + column[None, :]
        tl.store(g + at, rate[None, :] * softplus(a + bias[None, :]), mask=mask)
        tl.store(beta + at, tl.sigmoid(b), mask=mask)


@triton.jit
def _mix(
    qkv, filters, within, q, k, v, across, block, first, last, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolution, SiLU and L2 norm of one head of q, k or v."""
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    channel = across * WIDTH + column
    base = filters + block.to(tl.int64) * (3 * HEADS * WIDTH * 4)
    w0, w1, w2, w3 = load_filters(base, channel, inside)
    out = q
    if across >= HEADS:
        out = k
    if across >= 2 * HEADS:
        out = v
    out_column = (across % HEADS) * WIDTH + column
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < last
        position = tl.load(within + row, mask=alive, other=0)
        x3, x2, x1, x0 = window(qkv, row, position, channel, STRIDE, alive, inside)
        mixed = w3[None, :] * x3 + w2[None, :] * x2 + w1[None, :] * x1 + w0[None, :] * x0
        mixed = mixed * tl.sigmoid(mixed)
        if across < 2 * HEADS:
            mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 1) + EPS)[:, None]
        at = row[:, None] * (HEADS * WIDTH) + out_column[None, :]
        mask = alive[:, None] & inside[None, :]
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _inputs(
    qkv, ab, filters, decay_log, dt_bias, within, offs, q, k, v, g, beta,
    parts, QKV_STRIDE: tl.constexpr, AB_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    ALL: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v for a part of a block; the last program of a part takes the rates."""
    across = tl.program_id(0) % (3 * HEADS + 1)
    share = tl.program_id(0) // (3 * HEADS + 1)
    block = share // parts
    first, last = block_share(offs, block, share % parts, parts, ROWS)
    if across == 3 * HEADS:
        _rates(ab, decay_log, dt_bias, g, beta, block, first, last, AB_STRIDE, HEADS, ALL, ROWS)
    else:
        _mix(
            qkv, filters, within, q, k, v, across, block, first, last, QKV_STRIDE,
            HEADS, WIDTH, WIDE, ROWS,
        )  # fmt: skip


@operator("mol::delta_inputs")
def delta_inputs(
    qkv_NC: Tensor,
    ab_NG: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    within_N: Tensor,
    offs_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the gated delta rule takes: q, k, v [N, H, d], log decay g and step beta [N, H] fp32.

    q, k, v = SiLU(causal depthwise convolution inside the segment, filters of the row's block);
    q and k then L2-normalized per head; g = -exp(decay_log) softplus(a + dt_bias),
    beta = sigmoid(b). `qkv_NC` and `ab_NG` may be views with rows apart. `within_N` is the position
    in the segment, `offs_E` (int32) the last row + 1 of each block; rows are sorted by segment.
    Gradients of all five tensors of numbers.
    """
    n_rows, channels = qkv_NC.shape
    n_blocks, heads = dt_bias_EH.shape
    shape = n_rows, heads, channels // 3 // heads
    q, k, v = (qkv_NC.new_empty(shape) for _ in range(3))
    g, beta = (qkv_NC.new_empty(n_rows, heads, dtype=torch.float32) for _ in range(2))
    qkv_NC, ab_NG = row_strided(qkv_NC), row_strided(ab_NG)
    sizes = sizes_of_heads(heads, shape[2], ELEMENTS)
    parts = count_parts(n_rows, n_blocks, sizes["ROWS"], 3 * heads)
    _inputs[(n_blocks * parts * (3 * heads + 1),)](
        qkv_NC, ab_NG, filters_ECJ.contiguous(), decay_log_EH.contiguous(),
        dt_bias_EH.contiguous(), within_N, offs_E, q, k, v, g, beta,
        parts,
        QKV_STRIDE=qkv_NC.stride(0), AB_STRIDE=ab_NG.stride(0), **sizes,
    )  # fmt: skip
    return q, k, v, g, beta


@delta_inputs.register_fake
def _(qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH, within_N, offs_E):
    heads = dt_bias_EH.shape[1]
    shape = qkv_NC.shape[0], heads, qkv_NC.shape[1] // 3 // heads
    qkv = (qkv_NC.new_empty(shape) for _ in range(3))
    return *qkv, *(qkv_NC.new_empty(shape[:2], dtype=torch.float32) for _ in range(2))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _inputs_gradient(ctx, *grads):
    return *delta_inputs_backward(*ctx.saved_tensors, list(grads)), None, None


delta_inputs.register_autograd(_inputs_gradient, setup_context=_save)
