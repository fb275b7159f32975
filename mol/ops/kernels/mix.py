"""What surrounds the gated delta rule: convolution and rates before it, gated norm behind it (3.2).

The projection comes as its narrow parts (`z.split`), rows of which lie apart: both functions would
otherwise return a gradient as wide as z, mostly zeros, and adding them costs five passes over
[N, 4 M + 2 H]; joining narrow ones costs three. Sums are fp32, no atomics.

Bytes a row in bf16, d = M / H: `delta_inputs` reads and writes 3 M + 2 H numbers, 12 M; backward
30 M, as the gradient before SiLU passes through memory: row i needs that of rows i to i + 3, and
working it out four times is more arithmetic than the memory hides. `gated_norm` 6 M, backward 10 M.

Shape suffixes: N packed rows, E blocks, M width, H heads, d = M / H, C = 3 M channels (q, k, v),
J = 4 taps (the last meets the row itself), G = 2 H rates (a, b).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.gated_delta.naive import compute_dtype, l2norm
from mol.ops.kernels.shares import block_share, count_parts, row_strided

TAPS = 4
EPS = tl.constexpr(1e-6)  # of the L2 norm
ELEMENTS = 2048  # of a tile, 16 a thread
ELEMENTS_BACKWARD = 1024  # four sums a tile are kept in registers


def delta_inputs_reference(
    qkv_NC: Tensor,
    ab_NG: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    within_N: Tensor,
    offs_E: Tensor,
) -> tuple[Tensor, ...]:
    """`delta_inputs` in PyTorch."""
    dtype, heads = compute_dtype(qkv_NC), dt_bias_EH.shape[1]
    block_N = _blocks(offs_E, qkv_NC.shape[0])
    x_NC, filters_NCJ = qkv_NC.to(dtype), filters_ECJ.to(dtype)[block_N]
    mixed_NC = torch.zeros_like(x_NC)
    for by in range(TAPS):
        earlier_NC = F.pad(x_NC, (0, 0, by, 0))[: x_NC.shape[0]]
        earlier_NC = earlier_NC.masked_fill((within_N < by)[:, None], 0)
        mixed_NC = mixed_NC + filters_NCJ[..., TAPS - 1 - by] * earlier_NC
    q, k, v = F.silu(mixed_NC).view(x_NC.shape[0], 3, heads, -1).unbind(1)
    a_NH, b_NH = ab_NG.to(dtype).split(heads, -1)
    g_NH = -decay_log_EH.to(dtype).exp()[block_N] * F.softplus(a_NH + dt_bias_EH.to(dtype)[block_N])
    narrow = (t.to(qkv_NC.dtype) for t in (l2norm(q), l2norm(k), v))
    return *narrow, g_NH, b_NH.sigmoid()


def gated_norm_reference(
    o_NHd: Tensor, gate_NM: Tensor, norm_Ed: Tensor, offs_E: Tensor, eps: float = 1e-5
) -> Tensor:
    """`gated_norm` in PyTorch."""
    dtype = compute_dtype(gate_NM)
    block_N = _blocks(offs_E, gate_NM.shape[0])
    normed_NHd = F.rms_norm(o_NHd.to(dtype), o_NHd.shape[-1:], eps=eps)
    scaled_NHd = normed_NHd * norm_Ed.to(dtype)[block_N][:, None]
    return (scaled_NHd.reshape(gate_NM.shape) * F.silu(gate_NM.to(dtype))).to(gate_NM.dtype)


def _blocks(offs_E: Tensor, n_rows: int) -> Tensor:
    row_N = torch.arange(n_rows, device=offs_E.device)
    return torch.searchsorted(offs_E.long(), row_N, right=True)


@triton.jit
def _load_filters(filters, channel, inside):
    """The four taps of each channel. Read as they lie, 16 bytes a channel, and then taken apart:
    four strided reads would cost more than a tile's data."""
    tap = tl.arange(0, 4)
    at = channel[:, None] * 4 + tap[None, :]
    wide = tl.load(filters + at, mask=inside[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(wide, [wide.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _shifted(x, row, column, stride, mask, BY: tl.constexpr):
    """Tile of the rows `BY` below; masked elements are 0."""
    at = (row + BY)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _window(x, row, within, column, stride, alive, inside):
    """The rows themselves and 1, 2, 3 rows earlier in their segments."""
    now = _shifted(x, row, column, stride, alive[:, None] & inside[None, :], 0)
    one = _shifted(x, row, column, stride, (alive & (within >= 1))[:, None] & inside[None, :], -1)
    two = _shifted(x, row, column, stride, (alive & (within >= 2))[:, None] & inside[None, :], -2)
    three = _shifted(x, row, column, stride, (alive & (within >= 3))[:, None] & inside[None, :], -3)
    return now, one, two, three


@triton.jit
def _softplus(x):
    """log(1 + e^x) without overflow, and exact to rounding for e^x far below 1 (Kahan's log1p)."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    rest = one_more - 1.0
    ratio = tl.log(one_more) / tl.where(rest == 0.0, 1.0, rest)
    return tl.maximum(x, 0.0) + tl.where(rest == 0.0, small, ratio * small)


@triton.jit(do_not_specialize=["parts"])
def _inputs(
    qkv, ab, filters, decay_log, dt_bias, within, offs, q, k, v, g, beta,
    qkv_stride, ab_stride, parts, HEADS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v for a part of a block; the last program of a part takes the rates."""
    across = tl.program_id(0) % (3 * HEADS + 1)
    share = tl.program_id(0) // (3 * HEADS + 1)
    block = share // parts
    first, last = block_share(offs, block, share % parts, parts, ROWS)
    if across == 3 * HEADS:
        column = tl.arange(0, ALL)
        inside = column < HEADS
        decay = tl.load(decay_log + block * HEADS + column, mask=inside, other=0.0)
        rate = -tl.exp(decay.to(tl.float32))
        bias = tl.load(dt_bias + block * HEADS + column, mask=inside, other=0.0).to(tl.float32)
        for start in range(first, last, ROWS):
            row = (start + tl.arange(0, ROWS)).to(tl.int64)
            mask = (row < last)[:, None] & inside[None, :]
            a = _shifted(ab, row, column, ab_stride, mask, 0)
            b = _shifted(ab, row, column + HEADS, ab_stride, mask, 0)
            at = row[:, None] * HEADS + column[None, :]
            tl.store(g + at, rate[None, :] * _softplus(a + bias[None, :]), mask=mask)
            tl.store(beta + at, tl.sigmoid(b), mask=mask)
    else:
        column = tl.arange(0, WIDE)
        inside = column < WIDTH
        channel = across * WIDTH + column
        base = filters + block.to(tl.int64) * (3 * HEADS * WIDTH * 4)
        w0, w1, w2, w3 = _load_filters(base, channel, inside)
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
            x3, x2, x1, x0 = _window(qkv, row, position, channel, qkv_stride, alive, inside)
            mixed = w3[None, :] * x3 + w2[None, :] * x2 + w1[None, :] * x1 + w0[None, :] * x0
            mixed = mixed * tl.sigmoid(mixed)
            if across < 2 * HEADS:
                mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 1) + EPS)[:, None]
            at = row[:, None] * (HEADS * WIDTH) + out_column[None, :]
            mask = alive[:, None] & inside[None, :]
            tl.store(out + at, mixed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _inputs_backward(
    qkv, ab, filters, decay_log, dt_bias, within, offs, grad_q, grad_k, grad_v, grad_g, grad_beta,
    grad_mixed, grad_ab, part_filters, part_rates, qkv_stride, ab_stride, parts,
    HEADS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Back to the convolution's output and the filters; the last program of a part takes the
    rates, whole."""
    across = tl.program_id(0) % (3 * HEADS + 1)
    share = (tl.program_id(0) // (3 * HEADS + 1)).to(tl.int64)
    block = share // parts
    first, last = block_share(offs, block, (share % parts).to(tl.int32), parts, ROWS)
    if across == 3 * HEADS:
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
            a = _shifted(ab, row, column, ab_stride, mask, 0) + bias[None, :]
            b = tl.sigmoid(_shifted(ab, row, column + HEADS, ab_stride, mask, 0))
            at = row[:, None] * HEADS + column[None, :]
            back_g = tl.load(grad_g + at, mask=mask, other=0.0).to(tl.float32) * rate[None, :]
            back_a = back_g * tl.sigmoid(a)
            back_b = tl.load(grad_beta + at, mask=mask, other=0.0).to(tl.float32) * b * (1.0 - b)
            sum_decay += back_g * _softplus(a)
            sum_bias += back_a
            out = grad_ab + row[:, None] * (2 * HEADS) + column[None, :]
            tl.store(out, back_a.to(grad_ab.dtype.element_ty), mask=mask)
            tl.store(out + HEADS, back_b.to(grad_ab.dtype.element_ty), mask=mask)
        slot = part_rates + share * (2 * HEADS) + column
        tl.store(slot, tl.sum(sum_decay, 0), mask=inside)
        tl.store(slot + HEADS, tl.sum(sum_bias, 0), mask=inside)
    else:
        column = tl.arange(0, WIDE)
        inside = column < WIDTH
        channel = across * WIDTH + column
        base = filters + block * (3 * HEADS * WIDTH * 4)
        w0, w1, w2, w3 = _load_filters(base, channel, inside)
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
            x3, x2, x1, x0 = _window(qkv, row, position, channel, qkv_stride, alive, inside)
            back = _shifted(grad, row, grad_column, HEADS * WIDTH, mask, 0)
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


@triton.jit
def _later(x, row, within, last, column, stride, inside, BY: tl.constexpr):
    """Rows `BY` later in the same segment, else 0; a segment lies in one block, up to `last`."""
    there = row + BY < last
    position = tl.load(within + row + BY, mask=there, other=0)
    return _shifted(x, row, column, stride, (position >= BY)[:, None] & inside[None, :], BY)


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
    w0, w1, w2, w3 = _load_filters(base, channel, inside)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        back = w3[None, :] * _shifted(grad_mixed, row, channel, CHANNELS, mask, 0)
        back += w2[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 1)
        back += w1[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 2)
        back += w0[None, :] * _later(grad_mixed, row, within, end, channel, CHANNELS, inside, 3)
        at = row[:, None] * CHANNELS + channel[None, :]
        tl.store(grad_qkv + at, back.to(grad_qkv.dtype.element_ty), mask=mask)


@torch.library.custom_op("mol::delta_inputs", mutates_args=())
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
    sizes = _sizes(heads, shape[2], ELEMENTS)
    parts = count_parts(n_rows, n_blocks, sizes["ROWS"], 3 * heads)
    _inputs[(n_blocks * parts * (3 * heads + 1),)](
        qkv_NC, ab_NG, filters_ECJ.contiguous(), decay_log_EH.contiguous(),
        dt_bias_EH.contiguous(), within_N, offs_E, q, k, v, g, beta,
        qkv_NC.stride(0), ab_NG.stride(0), parts, **sizes,
    )  # fmt: skip
    return q, k, v, g, beta


def _sizes(heads: int, width: int, elements: int) -> dict[str, int]:
    wide = triton.next_power_of_2(width)
    rows = max(1, min(128, elements // wide))
    everyone = triton.next_power_of_2(heads)
    return {"HEADS": heads, "ALL": everyone, "WIDTH": width, "WIDE": wide, "ROWS": rows}


@delta_inputs.register_fake
def _(qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH, within_N, offs_E):
    heads = dt_bias_EH.shape[1]
    shape = qkv_NC.shape[0], heads, qkv_NC.shape[1] // 3 // heads
    qkv = (qkv_NC.new_empty(shape) for _ in range(3))
    return *qkv, *(qkv_NC.new_empty(shape[:2], dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("mol::delta_inputs_backward", mutates_args=())
def _delta_inputs_backward(
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
    sizes = _sizes(heads, channels // 3 // heads, ELEMENTS_BACKWARD)
    parts = count_parts(n_rows, n_blocks, sizes["ROWS"], 3 * heads)
    part_filters = qkv_NC.new_empty(n_blocks, parts, channels, TAPS, dtype=torch.float32)
    part_rates = qkv_NC.new_empty(n_blocks, parts, 2, heads, dtype=torch.float32)
    _inputs_backward[(n_blocks * parts * (3 * heads + 1),)](
        qkv_NC, ab_NG, filters_ECJ, decay_log_EH.contiguous(), dt_bias_EH.contiguous(), within_N,
        offs_E, *(grad.contiguous() for grad in grads), grad_mixed, grad_ab, part_filters,
        part_rates, qkv_NC.stride(0), ab_NG.stride(0), parts, **sizes,
    )  # fmt: skip
    wide, rows = 64, ELEMENTS // 64
    across = triton.cdiv(channels, wide)
    parts = count_parts(n_rows, n_blocks, rows, across)
    _convolve_back[(n_blocks * parts * across,)](
        grad_mixed, filters_ECJ, within_N, offs_E, grad_qkv, parts,
        CHANNELS=channels, WIDE=wide, ROWS=rows,
    )  # fmt: skip
    grad_decay, grad_bias = part_rates.sum(1).unbind(1)
    return (
        grad_qkv,
        grad_ab,
        part_filters.sum(1).to(filters_ECJ.dtype),
        grad_decay.to(decay_log_EH.dtype, copy=True).contiguous(),
        grad_bias.to(dt_bias_EH.dtype, copy=True).contiguous(),
    )


@_delta_inputs_backward.register_fake
def _(qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH, within_N, offs_E, grads):
    inputs = qkv_NC, ab_NG, filters_ECJ, decay_log_EH, dt_bias_EH
    return tuple(t.new_empty(t.shape) for t in inputs)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _inputs_gradient(ctx, *grads):
    return *_delta_inputs_backward(*ctx.saved_tensors, list(grads)), None, None


delta_inputs.register_autograd(_inputs_gradient, setup_context=_save)


@triton.jit(do_not_specialize=["parts"])
def _gated(
    o, gate, norm, offs, y, gate_stride, parts, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows here are heads of packed rows, in order: ROWS of them a tile."""
    block = tl.program_id(0) // parts
    first, last = block_share(offs, block, tl.program_id(0) % parts, parts, TILE)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    weight = tl.load(norm + block * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for start in range(first * HEADS, last * HEADS, ROWS):
        head = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (head < last * HEADS)[:, None] & inside[None, :]
        x = _shifted(o, head, column, WIDTH, mask, 0)
        at = head // HEADS * gate_stride + head % HEADS * WIDTH
        z = tl.load(gate + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        result = x * scale * weight[None, :] * z * tl.sigmoid(z)
        at = head[:, None] * WIDTH + column[None, :]
        tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _gated_backward(
    o, gate, norm, offs, grad_y, grad_o, grad_gate, part_norm, gate_stride, parts, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    block = share // parts
    first, last = block_share(offs, block, share % parts, parts, TILE)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    weight = tl.load(norm + block * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(first * HEADS, last * HEADS, ROWS):
        head = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (head < last * HEADS)[:, None] & inside[None, :]
        x = _shifted(o, head, column, WIDTH, mask, 0)
        back = _shifted(grad_y, head, column, WIDTH, mask, 0)
        at = head // HEADS * gate_stride + head % HEADS * WIDTH
        z = tl.load(gate + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        unit, sigmoid = x * scale, tl.sigmoid(z)
        back_z = back * unit * weight[None, :] * sigmoid * (1.0 + z * (1.0 - sigmoid))
        back *= z * sigmoid
        sums += back * unit
        back *= weight[None, :]
        back_o = (back - unit * (tl.sum(back * unit, 1) / WIDTH)[:, None]) * scale
        at = head[:, None] * WIDTH + column[None, :]
        tl.store(grad_o + at, back_o.to(grad_o.dtype.element_ty), mask=mask)
        tl.store(grad_gate + at, back_z.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(part_norm + share * WIDTH + column, tl.sum(sums, 0), mask=inside)


@torch.library.custom_op("mol::gated_norm", mutates_args=())
def gated_norm(
    o_NHd: Tensor, gate_NM: Tensor, norm_Ed: Tensor, offs_E: Tensor, eps: float = 1e-5
) -> Tensor:
    """RMSNorm(o) per head, times `norm` of the row's block, times SiLU(gate): [N, M] in the
    gate's precision. `gate_NM` may be a view with rows apart. Gradients of the first three."""
    y_NM = gate_NM.new_empty(gate_NM.shape)
    gate_NM = row_strided(gate_NM)
    n_blocks = norm_Ed.shape[0]
    sizes = _gated_sizes(o_NHd, ELEMENTS)
    parts = count_parts(o_NHd.shape[0], n_blocks, sizes["TILE"])
    _gated[(n_blocks * parts,)](
        o_NHd.contiguous(), gate_NM, norm_Ed.contiguous(), offs_E, y_NM, gate_NM.stride(0), parts,
        eps, **sizes,
    )  # fmt: skip
    return y_NM


def _gated_sizes(o_NHd: Tensor, elements: int) -> dict[str, int]:
    _, heads, width = o_NHd.shape
    wide = triton.next_power_of_2(width)
    rows = max(1, min(128, elements // wide))
    tile = max(1, rows // heads)
    return {"HEADS": heads, "WIDTH": width, "WIDE": wide, "ROWS": rows, "TILE": tile}


@gated_norm.register_fake
def _(o_NHd, gate_NM, norm_Ed, offs_E, eps=1e-5):
    return gate_NM.new_empty(gate_NM.shape)


@torch.library.custom_op("mol::gated_norm_backward", mutates_args=())
def _gated_norm_backward(
    o_NHd: Tensor, gate_NM: Tensor, norm_Ed: Tensor, offs_E: Tensor, eps: float, grad_NM: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_o, grad_gate = o_NHd.new_empty(o_NHd.shape), gate_NM.new_empty(gate_NM.shape)
    gate_NM = row_strided(gate_NM)
    n_blocks = norm_Ed.shape[0]
    sizes = _gated_sizes(o_NHd, ELEMENTS)
    parts = count_parts(o_NHd.shape[0], n_blocks, sizes["TILE"])
    part_norm = o_NHd.new_empty(n_blocks, parts, o_NHd.shape[2], dtype=torch.float32)
    _gated_backward[(n_blocks * parts,)](
        o_NHd.contiguous(), gate_NM, norm_Ed.contiguous(), offs_E, grad_NM.contiguous(), grad_o,
        grad_gate, part_norm, gate_NM.stride(0), parts, eps, **sizes,
    )  # fmt: skip
    return grad_o, grad_gate, part_norm.sum(1).to(norm_Ed.dtype)


@_gated_norm_backward.register_fake
def _(o_NHd, gate_NM, norm_Ed, offs_E, eps, grad_NM):
    return tuple(t.new_empty(t.shape) for t in (o_NHd, gate_NM, norm_Ed))


def _save_gated(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gated_gradient(ctx, grad_NM):
    return *_gated_norm_backward(*ctx.saved_tensors, ctx.eps, grad_NM), None, None


gated_norm.register_autograd(_gated_gradient, setup_context=_save_gated)
