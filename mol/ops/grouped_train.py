"""Grouped products with gradients on CUDA in bf16, each part by whichever kernel was faster.

A product has three parts: y = x W, the gradient of its rows g W^T, and that of its matrices x^T g.
`OWN` says which of them the project's kernels compute; PyTorch computes all others.

Shape suffixes: X rows of x (packed, or the tokens), N packed rows, E blocks, K and M the widths of
a matrix, d and F those of a feed-forward network.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import native_mm
from mol.ops.kernels.combine import combine, gather
from mol.ops.kernels.grouped_gemm import Tiles, launch
from mol.ops.kernels.grouped_weight import WeightTiles, grouped_weight

# Part: of y, "plain", "gathered" (of tokens' rows), "gelu" (also kept is what GELU is applied to)
# or "add"; of the gradients, "rows", "weight", or "gathered_weight".
# (part, K and M of the matrix) -> tiles. Equal groups are PyTorch's alone.
# Those at least 2 % faster than PyTorch on one NVIDIA H200 (torch 2.11.0+cu130, bf16, 2026-11-30),
# 15 blocks: DeltaNet 1+3of15 with 48,960 rows, MoL 2.08B with 49,152.
OWN: dict[tuple[str, int, int], Tiles | WeightTiles] = {
    ("gathered", 1024, 256): Tiles(128, 256, 64, 8, 4),
    ("plain", 256, 1032): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("plain", 256, 256): Tiles(128, 128, 64, 8, 3, tma=True),
    ("plain", 256, 1024): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("gelu", 256, 1024): Tiles(128, 128, 64, 8, 3, tma=True),
    ("add", 1024, 256): Tiles(128, 256, 64, 8, 4, tma=True),
    ("rows", 1024, 256): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("rows", 256, 256): Tiles(128, 128, 64, 8, 3, tma=True),
    ("rows", 256, 1024): Tiles(128, 256, 64, 8, 4, tma=True),
    ("gathered_weight", 1024, 256): WeightTiles(128, 256, 64, 8, 5),
    ("weight", 1024, 256): WeightTiles(128, 256, 64, 8, 4),
    ("weight", 256, 1032): WeightTiles(128, 128, 64, 4, 3),
    ("weight", 256, 256): WeightTiles(64, 128, 64, 4, 4),
    ("weight", 256, 1024): WeightTiles(128, 256, 64, 8, 4),
    ("gathered", 2048, 512): Tiles(128, 256, 64, 8, 4),
    ("plain", 512, 2064): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("plain", 512, 512): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("plain", 512, 2048): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("add", 2048, 512): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("rows", 2048, 512): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("rows", 512, 2064): Tiles(128, 256, 64, 8, 4, tma=True),
    ("rows", 512, 512): Tiles(128, 128, 64, 8, 3, tma=True),
    ("rows", 512, 2048): Tiles(128, 256, 64, 8, 3, tma=True, resident=True),
    ("gathered_weight", 2048, 512): WeightTiles(128, 256, 64, 8, 5),
    ("weight", 512, 2064): WeightTiles(256, 128, 64, 8, 4),
    ("weight", 512, 512): WeightTiles(256, 128, 64, 8, 4),
}


class Rows(NamedTuple):
    """Which rows belong to which block, and how the tokens' rows are packed (None: they are)."""

    offs_E: Tensor  # int32, last row + 1 of each block
    equal: bool  # all have the same number
    order_N: Tensor | None = None
    inverse_N: Tensor | None = None
    slots: int = 1

    def tiles(self, part: str, w_EKM: Tensor) -> Tiles | WeightTiles | None:
        """The own kernel's tiles, None where PyTorch computes this part."""
        if self.equal:
            return None
        if w_EKM.is_cuda and torch.cuda.get_device_capability(w_EKM.device)[0] < 9:
            return None  # the tiles want more shared memory than older GPUs have
        return OWN.get((part, *w_EKM.shape[1:]))

    def groups(self, t_NM: Tensor) -> Tensor:
        return t_NM.reshape(len(self.offs_E), -1, t_NM.shape[-1])


def trained_mm(
    x_NK: Tensor, w_EKM: Tensor, offs_E: Tensor, equal: bool, add_NM: Tensor | None
) -> Tensor:
    """`mol.ops.grouped.grouped_mm` with gradients, widths multiples of 8."""
    if add_NM is not None:
        add_NM = add_NM.to(x_NK.dtype)
    return _Product.apply(x_NK, w_EKM, add_NM, Rows(offs_E, equal or len(offs_E) == 1))


def trained_gathered_mm(x_XK: Tensor, w_EKM: Tensor, plan: RoutePlan) -> Tensor:
    """`mol.ops.grouped.gathered_mm` with gradients, widths multiples of 8."""
    rows = Rows(plan.offs_E, plan.equal, plan.order_N, plan.inverse_N, plan.slots)
    return _Product.apply(x_XK, w_EKM, None, rows)


def trained_ffn(
    h_Nd: Tensor, in_EdF: Tensor, out_EFd: Tensor, add_Nd: Tensor, offs_E: Tensor, equal: bool
) -> Tensor:
    """add + GELU(h W_in) W_out with gradients, widths multiples of 8. GELU is the tanh form."""
    return _FFN.apply(h_Nd, in_EdF, out_EFd, add_Nd, Rows(offs_E, equal or len(offs_E) == 1))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_XK, w_EKM, add_NM, rows):
        routed = rows.order_N is not None and not rows.equal
        if routed and rows.tiles("gathered", w_EKM) is None:
            # PyTorch multiplies a packed copy, which the gradient of the matrices wants, too.
            x_XK, rows = _packed(x_XK, rows), rows._replace(order_N=None)
        ctx.equal, ctx.slots = rows.equal, rows.slots
        ctx.save_for_backward(x_XK, w_EKM, rows.offs_E, rows.order_N, rows.inverse_N)
        return _forward(x_XK, w_EKM, rows, add_NM)

    @staticmethod
    def backward(ctx, grad_NM):
        # Once: recomputed layers give saved tensors out once.
        x_XK, w_EKM, offs_E, order_N, inverse_N = ctx.saved_tensors
        rows = Rows(offs_E, ctx.equal, order_N, inverse_N, ctx.slots)
        needs_x, needs_w, needs_add, _ = ctx.needs_input_grad
        grad_x = grad_w = None
        if needs_x:
            grad_x = _row_gradient(grad_NM, w_EKM, rows)
            if inverse_N is not None:
                grad_x = combine.recorded(grad_x, inverse_N, None, None, None, 1.0, 1.0, ctx.slots)
        if needs_w:
            grad_w = _weight_gradient(x_XK, grad_NM, w_EKM, rows)
        return grad_x, grad_w, grad_NM if needs_add else None, None


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_Nd, in_EdF, out_EFd, add_Nd, rows):
        tiles = rows.tiles("gelu", in_EdF)
        if tiles is None:
            wide_NF = _forward(h_Nd, in_EdF, rows)
            inner_NF = F.gelu(wide_NF, approximate="tanh")
        else:
            wide_NF = h_Nd.new_empty(h_Nd.shape[0], in_EdF.shape[2])
            inner_NF = launch(tiles, h_Nd, in_EdF, rows.offs_E, gelu=True, before_NM=wide_NF)
        ctx.equal = rows.equal
        ctx.save_for_backward(h_Nd, in_EdF, out_EFd, wide_NF, inner_NF, rows.offs_E)
        return _forward(inner_NF, out_EFd, rows, add_Nd)

    @staticmethod
    def backward(ctx, grad_Nd):
        h_Nd, in_EdF, out_EFd, wide_NF, inner_NF, offs_E = ctx.saved_tensors
        rows = Rows(offs_E, ctx.equal)
        needs_h, needs_in, needs_out, needs_add, _ = ctx.needs_input_grad
        grad_h = grad_in = grad_out = None
        if needs_out:
            grad_out = _weight_gradient(inner_NF, grad_Nd, out_EFd, rows)
        if needs_h or needs_in:
            grad_NF = _row_gradient(grad_Nd, out_EFd, rows)
            grad_NF = torch.ops.aten.gelu_backward(grad_NF, wide_NF, approximate="tanh")
            if needs_in:
                grad_in = _weight_gradient(h_Nd, grad_NF, in_EdF, rows)
            if needs_h:
                grad_h = _row_gradient(grad_NF, in_EdF, rows)
        return grad_h, grad_in, grad_out, grad_Nd if needs_add else None, None


def _forward(x_XK: Tensor, w_EKM: Tensor, rows: Rows, add_NM: Tensor | None = None) -> Tensor:
    part = "add" if add_NM is not None else "plain" if rows.order_N is None else "gathered"
    if (tiles := rows.tiles(part, w_EKM)) is not None:
        packing = rows.order_N, rows.slots
        return launch(tiles, x_XK, w_EKM, rows.offs_E, *packing, add_NM=add_NM)
    x_EnK = _packed(x_XK, rows)
    if not rows.equal:
        y_NM = native_mm(x_EnK, w_EKM, offs=rows.offs_E)
        return y_NM if add_NM is None else add_NM + y_NM
    if add_NM is None:
        return torch.bmm(x_EnK, w_EKM).flatten(0, 1)
    return torch.baddbmm(rows.groups(add_NM), x_EnK, w_EKM).flatten(0, 1)


def _row_gradient(grad_NM: Tensor, w_EKM: Tensor, rows: Rows) -> Tensor:
    """g W^T, [N, K]."""
    if (tiles := rows.tiles("rows", w_EKM)) is not None:
        return launch(tiles, grad_NM, w_EKM, rows.offs_E, transposed=True)
    w_EMK = w_EKM.transpose(1, 2)
    if rows.equal:
        return torch.bmm(rows.groups(grad_NM), w_EMK).flatten(0, 1)
    return native_mm(grad_NM.contiguous(), w_EMK, offs=rows.offs_E)


def _weight_gradient(x_XK: Tensor, grad_NM: Tensor, w_EKM: Tensor, rows: Rows) -> Tensor:
    """x^T g of each block, in the precision of the matrices."""
    gathered = rows.order_N is not None
    tiles = rows.tiles("gathered_weight" if gathered else "weight", w_EKM)
    if tiles is not None:
        packing = rows.order_N, rows.slots
        return grouped_weight(tiles, x_XK, grad_NM, rows.offs_E, *packing, w_EKM.dtype)
    x_EnK = _packed(x_XK, rows)
    if rows.equal:
        return torch.bmm(x_EnK.transpose(1, 2), rows.groups(grad_NM))
    return native_mm(x_EnK.t(), grad_NM.contiguous(), offs=rows.offs_E)


def _packed(x_XK: Tensor, rows: Rows) -> Tensor:
    """x by rows of the blocks, [N, K], or [E, n, K] if all have n: one copy that all share where
    every block sees all tokens."""
    if rows.order_N is None:
        return rows.groups(x_XK) if rows.equal else x_XK.contiguous()
    if rows.equal:
        return x_XK.expand(rows.slots, *x_XK.shape)
    return gather.recorded(x_XK, rows.inverse_N, rows.slots)
