"""Gradient of a grouped product's matrices in Triton: each block's rows of x, transposed, times
the gradients of its rows of y.

Blocks may have any number of rows, none included. Import this module on a machine with Triton only;
PyTorch's own product is in `mol.ops.grouped_train`.

Shape suffixes: N packed rows, X rows of x (N, or the tokens), E blocks, K and M the widths.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class WeightTiles(NamedTuple):
    """How one shape is computed: `rows` x `columns` of a matrix a program, `depth` packed rows at a
    time, of which `stages` are in flight; `tma`: rows, if not gathered, are copied by the tensor
    memory accelerator."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = True


@triton.jit
def _add_rows(
    x, g, order, sums, first, end, start_row, start_column, SLOTS: tl.constexpr,
    LAST: tl.constexpr, TMA: tl.constexpr, K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """sums + the products of some packed rows. Only a block's LAST ones may reach beyond its end,
    into another block's rows or memory that holds no numbers."""
    number = first + tl.arange(0, DEPTH)
    source = tl.minimum(number, end - 1) if LAST else number
    if TMA and order is None:
        left = x.load([first, start_row])
    else:
        place = source.to(tl.int64)
        if order is not None:
            place = tl.load(order + place) // SLOTS
        row = start_row + tl.arange(0, ROWS)
        left = tl.load(x + place[:, None] * K + row[None, :], mask=(row < K)[None, :], other=0.0)
    if TMA:
        right = g.load([first, start_column])
    else:
        column = start_column + tl.arange(0, COLUMNS)
        at = source.to(tl.int64)[:, None] * M + column[None, :]
        right = tl.load(g + at, mask=(column < M)[None, :], other=0.0)
    if LAST:
        inside = (number < end)[:, None]
        left, right = tl.where(inside, left, 0.0), tl.where(inside, right, 0.0)
    return tl.dot(left.T, right, sums)


@triton.jit
def _grouped_weight(
    x, g, offs, order, out, SLOTS: tl.constexpr, TMA: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one block's matrix. Programs beside each other read the same rows."""
    ACROSS: tl.constexpr = tl.cdiv(M, COLUMNS)
    TILES: tl.constexpr = tl.cdiv(K, ROWS) * ACROSS
    number = tl.program_id(0)
    tile, block = number % TILES, number // TILES
    start_row, start_column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
    end = tl.load(offs + block)
    first = tl.load(offs + block - 1, mask=block > 0, other=0)
    whole = first + (end - first) // DEPTH * DEPTH
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, whole, DEPTH):
        sums = _add_rows(
            x, g, order, sums, start, end, start_row, start_column, SLOTS, False, TMA, K, M, ROWS,
            COLUMNS, DEPTH,
        )  # fmt: skip
    if whole < end:
        sums = _add_rows(
            x, g, order, sums, whole, end, start_row, start_column, SLOTS, True, TMA, K, M, ROWS,
            COLUMNS, DEPTH,
        )  # fmt: skip
    row, column = start_row + tl.arange(0, ROWS), start_column + tl.arange(0, COLUMNS)
    at = block.to(tl.int64) * (K * M) + row[:, None] * M + column[None, :]
    mask = (row < K)[:, None] & (column < M)[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


def grouped_weight(
    tiles: WeightTiles,
    x_XK: Tensor,
    g_NM: Tensor,
    offs_E: Tensor,
    order_N: Tensor | None = None,
    slots: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x_e^T g_e of each block e, [E, K, M] in `dtype` (x's, if None); x and g bf16 or fp16.

    With `order_N` (a plan's) packed row n is row `order_N[n] // slots` of x. Sums are fp32 and
    rounded once. `offs_E` (int32) holds the last row + 1 of
    each block. Reads nothing on the host.
    """
    rows, columns, depth, warps, stages, tma = tiles
    x_XK, g_NM = x_XK.contiguous(), g_NM.contiguous()
    n_blocks, width_in, width_out = offs_E.shape[0], x_XK.shape[1], g_NM.shape[1]
    shape = n_blocks, width_in, width_out
    out_EKM = torch.empty(shape, dtype=dtype or x_XK.dtype, device=x_XK.device)
    # Addresses and rows of what is copied are multiples of 16 bytes.
    tma = (
        tma
        and (width_out | (0 if order_N is not None else width_in)) % 8 == 0
        and (x_XK.data_ptr() | g_NM.data_ptr()) % 16 == 0
        and g_NM.shape[0] > 0
    )
    x, g = x_XK, g_NM
    if tma:
        g = TensorDescriptor.from_tensor(g_NM, [depth, columns])
        if order_N is None:
            x = TensorDescriptor.from_tensor(x_XK, [depth, rows])
    programs = triton.cdiv(width_in, rows) * triton.cdiv(width_out, columns) * n_blocks
    _grouped_weight[(programs,)](
        x, g, offs_E, order_N, out_EKM, SLOTS=slots, TMA=tma, K=width_in, M=width_out, ROWS=rows,
        COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_EKM
