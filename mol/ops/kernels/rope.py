"""Bias and rotary positions of packed queries and keys; values only get their bias (2.1, 2.2).

12 M bytes a row in bf16 and 4 d of the tables, most of them from the cache; as much backward. Sums
are fp32, no atomics.

Shape suffixes: N packed rows, E blocks, M width, H heads, d = M / H, R = d / 2 rotation planes,
P = 3 M projected columns (q, k, v), T positions of the tables.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import block_share, count_parts, row_strided

ELEMENTS = 512  # of a tile of half a head, two of them for each of q, k and v


@triton.jit
def _table(table, time, plane, mask, PLANES: tl.constexpr):
    at = time.to(tl.int64)[:, None] * PLANES + plane[None, :]
    return tl.load(table + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["parts"])
def _forward(
    qkv, bias, cos, sin, time, offs, q, k, v, parts, STRIDE: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of q, k and v, so that the tables are read once for two rotations."""
    WIDTH: tl.constexpr = 2 * PLANES
    head = tl.program_id(0) % HEADS
    share = tl.program_id(0) // HEADS
    block = share // parts
    first, last = block_share(offs, block, share % parts, parts, ROWS)
    plane = tl.arange(0, WIDE)
    inside = plane < PLANES
    column = head * WIDTH + plane
    shift = bias + block.to(tl.int64) * (3 * HEADS * WIDTH) + column
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < last
        mask = alive[:, None] & inside[None, :]
        when = tl.load(time + row * STEP, mask=alive, other=0)
        c = _table(cos, when, plane, mask, PLANES)
        s = _table(sin, when, plane, mask, PLANES)
        at = qkv + row[:, None] * STRIDE + column[None, :]
        to = row[:, None] * (HEADS * WIDTH) + column[None, :]
        for which in tl.static_range(3):
            part = which * (HEADS * WIDTH)
            shift_a = tl.load(shift + part, mask=inside, other=0.0).to(tl.float32)
            shift_b = tl.load(shift + part + PLANES, mask=inside, other=0.0).to(tl.float32)
            a = tl.load(at + part, mask=mask, other=0.0).to(tl.float32) + shift_a[None, :]
            b = tl.load(at + part + PLANES, mask=mask, other=0.0).to(tl.float32) + shift_b[None, :]
            if which == 2:
                out = v
            else:
                turned = a * c - b * s
                b = a * s + b * c
                a = turned
                out = k if which == 1 else q
            tl.store(out + to, a.to(out.dtype.element_ty), mask=mask)
            tl.store(out + to + PLANES, b.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _backward(
    cos, sin, time, offs, grad_q, grad_k, grad_v, grad_qkv, part_bias, parts, HEADS: tl.constexpr,
    PLANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v, turned back; the bias takes the sum over rows."""
    WIDTH: tl.constexpr = 2 * PLANES
    across = tl.program_id(0) % (3 * HEADS)
    share = (tl.program_id(0) // (3 * HEADS)).to(tl.int64)
    first, last = block_share(offs, share // parts, (share % parts).to(tl.int32), parts, ROWS)
    plane = tl.arange(0, WIDE)
    inside = plane < PLANES
    grad = grad_q
    if across >= HEADS:
        grad = grad_k
    if across >= 2 * HEADS:
        grad = grad_v
    sum_a = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum_b = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        alive = row < last
        mask = alive[:, None] & inside[None, :]
        at = grad + row[:, None] * (HEADS * WIDTH) + ((across % HEADS) * WIDTH + plane)[None, :]
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + PLANES, mask=mask, other=0.0).to(tl.float32)
        if across < 2 * HEADS:
            when = tl.load(time + row, mask=alive, other=0)
            c = _table(cos, when, plane, mask, PLANES)
            s = _table(sin, when, plane, mask, PLANES)
            turned = a * c + b * s
            b = b * c - a * s
            a = turned
        sum_a += a
        sum_b += b
        to = grad_qkv + row[:, None] * (3 * HEADS * WIDTH) + (across * WIDTH + plane)[None, :]
        tl.store(to, a.to(grad_qkv.dtype.element_ty), mask=mask)
        tl.store(to + PLANES, b.to(grad_qkv.dtype.element_ty), mask=mask)
    slot = part_bias + share * (3 * HEADS * WIDTH) + across * WIDTH + plane
    tl.store(slot, tl.sum(sum_a, 0), mask=inside)
    tl.store(slot + PLANES, tl.sum(sum_b, 0), mask=inside)


def _sizes(columns: int, planes: int) -> dict[str, int]:
    wide = triton.next_power_of_2(planes)
    rows = max(1, min(64, ELEMENTS // wide))
    return {"HEADS": columns // (6 * planes), "PLANES": planes, "WIDE": wide, "ROWS": rows}


@operator("mol::bias_rope")
def bias_rope(
    qkv_NP: Tensor,
    bias_EP: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    time_N: Tensor,
    offs_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [N, H, d]: the projection plus the bias of the row's block, q and k turned to
    position `time_N` (int64) by half-split pairs (x_i, x_{i + R}), as `mol.ops.attention.Rope`.

    `cos_TR` and `sin_TR` fp32, `offs_E` (int32) the last row + 1 of each block. `qkv_NP` may have
    its rows apart, and `time_N` be one number for all. Gradients of the projection and the bias.
    """
    n_rows, columns = qkv_NP.shape
    sizes = _sizes(columns, cos_TR.shape[1])
    shape = n_rows, sizes["HEADS"], 2 * sizes["PLANES"]
    q, k, v = (qkv_NP.new_empty(shape) for _ in range(3))
    qkv_NP = row_strided(qkv_NP)
    parts = count_parts(n_rows, bias_EP.shape[0], sizes["ROWS"], sizes["HEADS"])
    _forward[(bias_EP.shape[0] * parts * sizes["HEADS"],)](
        qkv_NP, bias_EP.contiguous(), cos_TR, sin_TR, time_N, offs_E, q, k, v, parts,
        STRIDE=qkv_NP.stride(0), STEP=time_N.stride(0), **sizes,
    )  # fmt: skip
    return q, k, v


@bias_rope.register_fake
def _(qkv_NP, bias_EP, cos_TR, sin_TR, time_N, offs_E):
    width = 2 * cos_TR.shape[1]
    shape = qkv_NP.shape[0], qkv_NP.shape[1] // (3 * width), width
    return tuple(qkv_NP.new_empty(shape) for _ in range(3))


@torch.library.custom_op("mol::bias_rope_backward", mutates_args=())
def _bias_rope_backward(
    bias_EP: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    time_N: Tensor,
    offs_E: Tensor,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    n_rows = time_N.shape[0]
    n_blocks, columns = bias_EP.shape
    grad_qkv = grads[0].new_empty(n_rows, columns)
    sizes = _sizes(columns, cos_TR.shape[1])
    across = 3 * sizes["HEADS"]
    parts = count_parts(n_rows, n_blocks, sizes["ROWS"], across)
    part_bias = grad_qkv.new_empty(n_blocks, parts, columns, dtype=torch.float32)
    _backward[(n_blocks * parts * across,)](
        cos_TR, sin_TR, time_N.contiguous(), offs_E, *(grad.contiguous() for grad in grads),
        grad_qkv, part_bias, parts, **sizes,
    )  # fmt: skip
    return grad_qkv, add_up(part_bias, bias_EP.new_empty(bias_EP.shape))


@_bias_rope_backward.register_fake
def _(bias_EP, cos_TR, sin_TR, time_N, offs_E, grads):
    return grads[0].new_empty(time_N.shape[0], bias_EP.shape[1]), bias_EP.new_empty(bias_EP.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _gradient(ctx, *grads):
    return *_bias_rope_backward(*ctx.saved_tensors, list(grads)), None, None, None, None


bias_rope.register_autograd(_gradient, setup_context=_save)
