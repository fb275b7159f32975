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

from mol.ops.kernels.delta_solve import find_chunk, searched
from mol.ops.kernels.gated_norm import gated_norm
from mol.ops.kernels.mix_backward import delta_inputs_backward
from mol.ops.kernels.mix_tiles import EPS, load_filters, shifted, silu, softplus
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import row_strided

__all__ = ["delta_inputs", "gated_norm"]

TILES = {
    "channels": 512,  # of a program, in whole heads
    "a thread": 8,  # channels
    "rows": (16, 64),  # of a program: the fewest, and the most
    "programs": 1024,  # as many as there may be before rows are doubled
}


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
    row = first + tl.arange(0, ROWS)
    mask = (row < last)[:, None] & inside[None, :]
    a = shifted(ab, row, column, STRIDE, mask, 0)
    b = shifted(ab, row, column + HEADS, STRIDE, mask, 0)
    at = row[:, None] * HEADS + column[None, :]
    tl.store(g + at, rate[None, :] * softplus(a + bias[None, :]), mask=mask)
    tl.store(beta + at, tl.sigmoid(b), mask=mask)


@triton.jit
def _row(at, row, first, last, inside, STRIDE: tl.constexpr):
    """A row of the channels `at`, zero if not from `first` to before `last`."""
    mask = inside & (row >= first) & (row < last)
    return tl.load(at + row * STRIDE, mask, other=0.0).to(tl.float32)


@triton.jit
def _store_mixed(
    out, row, last, inside, w0, w1, w2, w3, x0, x1, x2, x3, STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """SiLU of a row's convolution with the three rows before it; if UNIT, heads of length 1."""
    mixed = silu(w3 * x3 + w2 * x2 + w1 * x1 + w0 * x0)
    if UNIT:
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 1) + EPS)[:, None]
    tl.store(out + row * STRIDE, mixed.to(out.dtype.element_ty), inside & (row < last))


@triton.jit
def _mix(
    qkv, filters, out, part, group, block, start, first, last, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """GROUP heads of q, k or v for the rows first .. last of a segment that begins at `start`.

    A tile is one row, and stays in registers for the three rows after it: each row is read once,
    and the next four are under way during the arithmetic of four.
    """
    head, column = group * GROUP + tl.arange(0, GROUP)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    channel = head * WIDTH + column
    at = qkv + part * (HEADS * WIDTH) + channel
    x0 = _row(at, first - 3, start, last, inside, STRIDE)
    x1 = _row(at, first - 2, start, last, inside, STRIDE)
    x2 = _row(at, first - 1, start, last, inside, STRIDE)
    next0 = _row(at, first, start, last, inside, STRIDE)
    next1 = _row(at, first + 1, start, last, inside, STRIDE)
    next2 = _row(at, first + 2, start, last, inside, STRIDE)
    next3 = _row(at, first + 3, start, last, inside, STRIDE)
    flat: tl.constexpr = GROUP * WIDE
    base = filters + (block.to(tl.int64) * 3 + part) * (HEADS * WIDTH * 4)
    taps = load_filters(base, tl.reshape(channel, [flat]), tl.reshape(inside, [flat]))
    w0, w1 = tl.reshape(taps[0], [GROUP, WIDE]), tl.reshape(taps[1], [GROUP, WIDE])
    w2, w3 = tl.reshape(taps[2], [GROUP, WIDE]), tl.reshape(taps[3], [GROUP, WIDE])
    to, width = out + channel, HEADS * WIDTH
    for row in range(first, last, 4):
        x3, x4, x5, x6 = next0, next1, next2, next3
        next0 = _row(at, row + 4, start, last, inside, STRIDE)
        next1 = _row(at, row + 5, start, last, inside, STRIDE)
        next2 = _row(at, row + 6, start, last, inside, STRIDE)
        next3 = _row(at, row + 7, start, last, inside, STRIDE)
        _store_mixed(to, row, last, inside, w0, w1, w2, w3, x0, x1, x2, x3, width, UNIT)
        _store_mixed(to, row + 1, last, inside, w0, w1, w2, w3, x1, x2, x3, x4, width, UNIT)
        _store_mixed(to, row + 2, last, inside, w0, w1, w2, w3, x2, x3, x4, x5, width, UNIT)
        _store_mixed(to, row + 3, last, inside, w0, w1, w2, w3, x3, x4, x5, x6, width, UNIT)
        x0, x1, x2 = x4, x5, x6


@triton.jit(do_not_specialize=["segments", "batch"])
def _inputs(
    qkv, ab, filters, decay_log, dt_bias, cu_seqlens, q, k, v, g, beta, segments, batch,
    QKV_STRIDE: tl.constexpr, AB_STRIDE: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a segment: some heads of q, k or v, or the rates of all heads."""
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    across = tl.program_id(0) % (3 * groups + 1)
    slot = tl.program_id(0) // (3 * groups + 1)
    first, end, segment = find_chunk(cu_seqlens, slot, segments, SEGMENTS, ROWS)
    if first >= end:
        return
    start = tl.load(cu_seqlens + segment)
    last, block = tl.minimum(first + ROWS, end), segment // batch
    if across == 3 * groups:
        _rates(ab, decay_log, dt_bias, g, beta, block, first, last, AB_STRIDE, HEADS, ALL, ROWS)
    elif across >= 2 * groups:
        _mix(
            qkv, filters, v, 2, across - 2 * groups, block, start, first, last, QKV_STRIDE,
            HEADS, WIDTH, WIDE, GROUP, False,
        )  # fmt: skip
    else:
        part, out = across // groups, q
        if part == 1:
            out = k
        _mix(
            qkv, filters, out, part, across % groups, block, start, first, last, QKV_STRIDE,
            HEADS, WIDTH, WIDE, GROUP, True,
        )  # fmt: skip


def _tiles(n_rows: int, heads: int, width: int) -> dict[str, int]:
    wide, everyone = triton.next_power_of_2(width), triton.next_power_of_2(heads)
    group = min(everyone, max(1, TILES["channels"] // wide))
    rows, most = TILES["rows"]
    while rows < most and n_rows // rows * 3 * triton.cdiv(heads, group) > TILES["programs"]:
        rows *= 2
    warps = max(1, min(8, group * wide // (32 * TILES["a thread"])))
    sizes = {"HEADS": heads, "ALL": everyone, "WIDTH": width, "WIDE": wide}
    return {**sizes, "GROUP": group, "ROWS": rows, "num_warps": warps}


@operator("mol::delta_inputs")
def delta_inputs(
    qkv_NC: Tensor,
    ab_NG: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    within_N: Tensor,
    offs_E: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the gated delta rule takes: q, k, v [N, H, d], log decay g and step beta [N, H] fp32.

    q, k, v = SiLU(causal depthwise convolution inside the segment, filters of the row's block);
    q and k then L2-normalized per head; g = -exp(decay_log) softplus(a + dt_bias),
    beta = sigmoid(b). `qkv_NC` and `ab_NG` may be views with rows apart. `cu_seqlens` (int32) are
    the edges of the segments, numbered block * B + sequence; the backward pass alone reads
    `within_N`, the position in the segment, and `offs_E` (int32), the last row + 1 of each block.
    Gradients of all five tensors of numbers.
    """
    n_rows, channels = qkv_NC.shape
    n_blocks, heads = dt_bias_EH.shape
    shape = n_rows, heads, channels // 3 // heads
    q, k, v = (qkv_NC.new_empty(shape) for _ in range(3))
    g, beta = (qkv_NC.new_empty(n_rows, heads, dtype=torch.float32) for _ in range(2))
    qkv_NC, ab_NG = row_strided(qkv_NC), row_strided(ab_NG)
    segments, sizes = cu_seqlens.numel() - 1, _tiles(*shape)
    slots = n_rows // sizes["ROWS"] + segments
    across = 3 * triton.cdiv(heads, sizes["GROUP"]) + 1
    _inputs[(slots * across,)](
        qkv_NC, ab_NG, filters_ECJ.contiguous(), decay_log_EH.contiguous(),
        dt_bias_EH.contiguous(), cu_seqlens, q, k, v, g, beta, segments, segments // n_blocks,
        QKV_STRIDE=qkv_NC.stride(0), AB_STRIDE=ab_NG.stride(0),
        SEGMENTS=searched(segments), **sizes,
    )  # fmt: skip
    return q, k, v, g, beta


@delta_inputs.register_fake
def _(qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH, within_N, offs_E, cu_seqlens):
    heads = dt_bias_EH.shape[1]
    shape = qkv_NC.shape[0], heads, qkv_NC.shape[1] // 3 // heads
    qkv = (qkv_NC.new_empty(shape) for _ in range(3))
    return *qkv, *(qkv_NC.new_empty(shape[:2], dtype=torch.float32) for _ in range(2))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:-1])


def _inputs_gradient(ctx, *grads):
    return *delta_inputs_backward(*ctx.saved_tensors, list(grads)), None, None, None


delta_inputs.register_autograd(_inputs_gradient, setup_context=_save)
