"""Norm and gate of the gated delta rule's output (3.2).

6 M bytes a row in bf16, 10 M backward. Sums are fp32, no atomics.

Shape suffixes: N packed rows, E blocks, M width, H heads, d = M / H.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.mix_tiles import shifted
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import block_share, count_parts, row_strided

ELEMENTS = 2048  # of a tile, 16 a thread


@triton.jit(do_not_specialize=["parts"])
def _gated(
    o, gate, norm, offs, y, parts, eps, STRIDE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
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
        x = shifted(o, head, column, WIDTH, mask, 0)
        at = head // HEADS * STRIDE + head % HEADS * WIDTH
        z = tl.load(gate + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        result = x * scale * weight[None, :] * z * tl.sigmoid(z)
        at = head[:, None] * WIDTH + column[None, :]
        tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _gated_backward(
    o, gate, norm, offs, grad_y, grad_o, grad_gate, part_norm, parts, eps, STRIDE: tl.constexpr,
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
        x = shifted(o, head, column, WIDTH, mask, 0)
        back = shifted(grad_y, head, column, WIDTH, mask, 0)
        at = head // HEADS * STRIDE + head % HEADS * WIDTH
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


@operator("mol::gated_norm")
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
        o_NHd.contiguous(), gate_NM, norm_Ed.contiguous(), offs_E, y_NM, parts, eps,
        STRIDE=gate_NM.stride(0), **sizes,
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
        grad_gate, part_norm, parts, eps, STRIDE=gate_NM.stride(0), **sizes,
    )  # fmt: skip
    return grad_o, grad_gate, add_up(part_norm, norm_Ed.new_empty(norm_Ed.shape))


@_gated_norm_backward.register_fake
def _(o_NHd, gate_NM, norm_Ed, offs_E, eps, grad_NM):
    return tuple(t.new_empty(t.shape) for t in (o_NHd, gate_NM, norm_Ed))


def _save_gated(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gated_gradient(ctx, grad_NM):
    return *_gated_norm_backward(*ctx.saved_tensors, ctx.eps, grad_NM), None, None


gated_norm.register_autograd(_gated_gradient, setup_context=_save_gated)
