"""Gradients of the gated delta rule's inputs; see `mol.ops.kernels.mix`.

The gradient before SiLU passes through memory: a row needs that of the three rows after it, too,
and working it out four times is more arithmetic than reading the rows hides.

Shape suffixes: N packed rows, E blocks, M width, H heads, d = M / H, C = 3 M channels (q, k, v),
J = 4 taps (the last meets the row itself), G = 2 H rates (a, b).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.mix_tiles import (
    EPS,
    TAPS,
    load_filters,
    shifted,
    sizes_of_heads,
    softplus,
    window,
)
from mol.ops.kernels.shares import block_share, count_parts, row_strided

ELEMENTS = 1024  # of a tile: 8 a thread, since four sums a tile stay in registers
CHANNELS_AT_ONCE, ROWS_AT_ONCE = 64, 32  # of the convolution


@triton.jit
def _rates_back(
    ab, decay_log, dt_bias, grad_g, grad_beta, grad_ab, part_rates, share, block, first, last,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, ALL)
    inside = column < HEADS
    decay = tl.load(decay_log + block * HEADS + column, mask=inside, other=0.0)
    rate = -tl.exp(decay.to(tl.float32))
    bias = tl.load(dt_bias + block * HEADS + column, mask=inside, other=0.0).to(tl.float32)
    sum_decay = tl.zeros([ROWS, ALL], dtype=tl.float32)
    sum_bias = tl.zeros([ROWS, ALL], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        a = shifted(ab, row, column, STRIDE, mask, 0) + bias[None, :]
        b = tl.sigmoid(shifted(ab, row, column + HEADS, STRIDE, mask, 0))
        at = row[:, None] * HEADS + column[None, :]
        back_g = tl.load(grad_g + at, mask=mask, other=0.0).to(tl.float32) * rate[None, :]
        back_a = back_g * tl.sigmoid(a)
        back_b = tl.load(grad_beta + at, mask=mask, other=0.0).to(tl.float32) * b * (1.0 - b)
        sum_decay += back_g * softplus(a)
        sum_bias += back_a
        out = grad_ab + row[:, None] * (2 * HEADS) + column[None, :]
        tl.store(out, back_a.to(grad_ab.dtype.element_ty), mask=mask)
        tl.store(out + HEADS, back_b.to(grad_ab.dtype.element_ty), mask=mask)
    slot = part_rates + share * (2 * HEADS) + column
    tl.store(slot, tl.sum(sum_decay, 0), mask=inside)
    tl.store(slot + HEADS, tl.sum(sum_bias, 0), mask=inside)


@triton.jit
def _mix_back(
    qkv, filters, within, grad_q, grad_k, grad_v, grad_mixed, part_filters, across, share, block,
    first, last, STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """To the convolution's output, and the filters' sums over rows."""
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    channel = across * WIDTH + column
    base = filters + block * (3 * HEADS * WIDTH * 4)
    w0, w1, w2, w3 = load_filters(base, channel, inside)
    grad = grad_q
    if across >= HEADS:
        grad = grad_k
    if across >= 2 * HEADS:
        grad = grad_v
    grad_column = (across % HEADS) * WIDTH + column
    sum0 = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum1 = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum2 = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum3 = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < last
        mask = alive[:, None] & inside[None, :]
        position = tl.load(within + row, mask=alive, other=0)
        x3, x2, x1, x0 = window(qkv, row, position, channel, STRIDE, alive, inside)
        back = shifted(grad, row, grad_column, HEADS * WIDTH, mask, 0)
        mixed = w3[None, :] * x3 + w2[None, :] * x2 + w1[None, :] * x1 + w0[None, :] * x0
        gate = tl.sigmoid(mixed)
        if across < 2 * HEADS:
            silu = mixed * gate
            scale = tl.rsqrt(tl.sum(silu * silu, 1) + EPS)[:, None]
            unit = silu * scale
            back = (back - unit * tl.sum(unit * back, 1)[:, None]) * scale
        back = back * gate * (1.0 + mixed * (1.0 - gate))
        sum0 += back * x0
        sum1 += back * x1
        sum2 += back * x2
        sum3 += back * x3
        at = row[:, None] * (3 * HEADS * WIDTH) + channel[None, :]
        tl.store(grad_mixed + at, back.to(grad_mixed.dtype.element_ty), mask=mask)
    slot = part_filters + (share * (3 * HEADS * WIDTH) + channel) * 4
    tl.store(slot, tl.sum(sum0, 0), mask=inside)
    tl.store(slot + 1, tl.sum(sum1, 0), mask=inside)
    tl.store(slot + 2, tl.sum(sum2, 0), mask=inside)
    tl.store(slot + 3, tl.sum(sum3, 0), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def _inputs_backward(
    qkv, ab, filters, decay_log, dt_bias, within, offs, grad_q, grad_k, grad_v, grad_g, grad_beta,
    grad_mixed, grad_ab, part_filters, part_rates, parts, QKV_STRIDE: tl.constexpr,
    AB_STRIDE: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    across = tl.program_id(0) % (3 * HEADS + 1)
    share = (tl.program_id(0) // (3 * HEADS + 1)).to(tl.int64)
    block = share // parts
    first, last = block_share(offs, block, (share % parts).to(tl.int32), parts, ROWS)
    if across == 3 * HEADS:
        _rates_back(
            ab, decay_log, dt_bias, grad_g, grad_beta, grad_ab, part_rates, share, block, first,
            last, AB_STRIDE, HEADS, ALL, ROWS,
        )  # fmt: skip
    else:
        _mix_back(
            qkv, filters, within, grad_q, grad_k, grad_v, grad_mixed, part_filters, across, share,
            block, first, last, QKV_STRIDE, HEADS, WIDTH, WIDE, ROWS,
        )  # fmt: skip


@triton.jit
def _later(x, row, within, last, column, stride, inside, BY: tl.constexpr):
    """Rows `BY` later in the same segment, else 0; a segment lies in one block, up to `last`."""
    there = row + BY < last
    position = tl.load(within + row + BY, mask=there, other=0)
    return shifted(x, row, column, stride, (position >= BY)[:, None] & inside[None, :], BY)


@triton.jit(do_not_specialize=["parts"])
def _convolve_back(
    grad_mixed, filters, within, offs, grad_qkv, parts, CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The convolution transposed: row i takes what it gave to rows i to i + 3."""
    across = tl.program_id(0) % tl.cdiv(CHANNELS, WIDE)
    share = tl.program_id(0) // tl.cdiv(CHANNELS, WIDE)
    block = share // parts
    first, last = block_share(offs, block, share % parts, parts, ROWS)
    end = tl.load(offs + block)
    channel = across * WIDE + tl.arange(0, WIDE)
    inside = channel < CHANNELS
    base = filters + block.to(tl.int64) * (CHANNELS * 4)
    w0, w1, w2, w3 = load_filters(base, channel, inside)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        back = w3[None, :] * shifted(grad_mixed, row, channel, CHANNELS, mask, 0)
        back += w2[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 1)
        back += w1[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 2)
        back += w0[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 3)
        at = row[:, None] * CHANNELS + channel[None, :]
        tl.store(grad_qkv + at, back.to(grad_qkv.dtype.element_ty), mask=mask)


@torch.library.custom_op("mol::delta_inputs_backward", mutates_args=())
def delta_inputs_backward(
    qkv_NC: Tensor,
    ab_NG: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    within_N: Tensor,
    offs_E: Tensor,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n_rows, channels = qkv_NC.shape
    n_blocks, heads = dt_bias_EH.shape
    qkv_NC, ab_NG, filters_ECJ = row_strided(qkv_NC), row_strided(ab_NG), filters_ECJ.contiguous()
    grad_mixed, grad_qkv = (qkv_NC.new_empty(n_rows, channels) for _ in range(2))
    grad_ab = ab_NG.new_empty(ab_NG.shape)
    sizes = sizes_of_heads(heads, channels // 3 // heads, ELEMENTS)
    parts = count_parts(n_rows, n_blocks, sizes["ROWS"], 3 * heads)
    part_filters = qkv_NC.new_empty(n_blocks, parts, channels, TAPS, dtype=torch.float32)
    part_rates = qkv_NC.new_empty(n_blocks, parts, 2, heads, dtype=torch.float32)
    _inputs_backward[(n_blocks * parts * (3 * heads + 1),)](
        qkv_NC, ab_NG, filters_ECJ, decay_log_EH.contiguous(), dt_bias_EH.contiguous(), within_N,
        offs_E, *(grad.contiguous() for grad in grads), grad_mixed, grad_ab, part_filters,
        part_rates, parts, QKV_STRIDE=qkv_NC.stride(0), AB_STRIDE=ab_NG.stride(0), **sizes,
    )  # fmt: skip
    across = triton.cdiv(channels, CHANNELS_AT_ONCE)
    parts = count_parts(n_rows, n_blocks, ROWS_AT_ONCE, across)
    _convolve_back[(n_blocks * parts * across,)](
        grad_mixed, filters_ECJ, within_N, offs_E, grad_qkv, parts,
        CHANNELS=channels, WIDE=CHANNELS_AT_ONCE, ROWS=ROWS_AT_ONCE,
    )  # fmt: skip
    grad_filters = add_up(part_filters, filters_ECJ.new_empty(filters_ECJ.shape))
    grad_rates = add_up(part_rates, part_rates.new_empty(n_blocks, 2, heads))
    grad_decay, grad_bias = grad_rates.unbind(1)
    return (
        grad_qkv,
        grad_ab,
        grad_filters,
        grad_decay.to(decay_log_EH.dtype, copy=True).contiguous(),
        grad_bias.to(dt_bias_EH.dtype, copy=True).contiguous(),
    )


@delta_inputs_backward.register_fake
def _(qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH, within_N, offs_E, grads):
    inputs = qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH
    return tuple(t.new_empty(t.shape) for t in inputs)
