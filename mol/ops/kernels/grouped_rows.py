"""The grouped product of training in Triton: it also keeps what GELU is applied to, multiplies by
transposed matrices for the gradient of the rows, and by GELU's derivative.

Import this module on a machine with Triton only; PyTorch's own product is in
`mol.ops.grouped_train`.

Shape suffixes: N packed rows, X rows of x (N, or the tokens), E blocks, K the width that is summed
over, M that of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mol.ops.kernels.grouped_gemm import Tiles, _blocks, _place, _programs


@triton.jit
def _tile(
    x, w, order, add, before, y, block, first, end, start_column, SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, GELU: tl.constexpr, TMA: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The tile of y whose first row and column are given."""
    row = first + tl.arange(0, ROWS)
    # Rows beyond the block repeat its last one; they are not stored.
    source = tl.minimum(row, end - 1).to(tl.int64)
    if order is not None:
        source = tl.load(order + source) // SLOTS
    column = start_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows_at = source[:, None] * K + depth[None, :]
    # In memory the matrix is [M, K] if TRANSPOSED, else [K, M].
    DEEP: tl.constexpr = 1 if TRANSPOSED else M
    WIDE: tl.constexpr = K if TRANSPOSED else 1
    columns_at = block.to(tl.int64) * (K * M) + depth[:, None] * DEEP + column[None, :] * WIDE
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if TMA and order is None:
            left = x.load([first, start])
        elif K % DEPTH == 0:
            left = tl.load(x + rows_at + start)
        else:
            left = tl.load(x + rows_at + start, mask=(depth < K - start)[None, :], other=0.0)
        if TMA and TRANSPOSED:
            right = w.load([block * M + start_column, start]).T
        elif TMA:
            right = w.load([block * K + start, start_column])
        else:
            mask = (depth < K - start)[:, None] & (column < M)[None, :]
            right = tl.load(w + columns_at + start * DEEP, mask=mask, other=0.0)
        sums = tl.dot(left, right, sums)
    at = row.to(tl.int64)[:, None] * M + column[None, :]
    mask = (row < end)[:, None] & (column < M)[None, :]
    if before is not None:
        # GELU(v) = v / 2 (1 + tanh u) is v s with s = sigmoid(2 u).
        if GELU:
            tl.store(before + at, sums.to(before.dtype.element_ty), mask=mask)
            value = sums
        else:
            value = tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
        square = value * value
        twice = 1.5957691216057308 * (value + 0.044715 * square * value)
        share = 1.0 / (1.0 + tl.exp(-twice))
        if GELU:
            sums = value * share
        else:
            slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
            sums *= share + value * share * (1.0 - share) * slope
    if add is not None:
        sums += tl.load(add + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_rows(
    x, w, offs, order, add, before, y, COUNT: tl.constexpr, PADDED: tl.constexpr,
    SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, GELU: tl.constexpr, TMA: tl.constexpr,
    RESIDENT: tl.constexpr, K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Programs beside each other share rows of x, and the next ones their block's matrix."""
    ACROSS: tl.constexpr = tl.cdiv(M, COLUMNS)
    starts, ends, tiles = _blocks(offs, COUNT, PADDED, ROWS)
    count = tl.sum(tiles, 0) * ACROSS
    number = tl.program_id(0)
    if RESIDENT:
        for mine in tl.range(number, count, tl.num_programs(0), flatten=True):
            block, first, end = _place(starts, ends, tiles, mine // ACROSS, ROWS)
            _tile(
                x, w, order, add, before, y, block, first, end, mine % ACROSS * COLUMNS, SLOTS,
                TRANSPOSED, GELU, TMA, K, M, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
    elif number < count:
        block, first, end = _place(starts, ends, tiles, number // ACROSS, ROWS)
        _tile(
            x, w, order, add, before, y, block, first, end, number % ACROSS * COLUMNS, SLOTS,
            TRANSPOSED, GELU, TMA, K, M, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip


def grouped_rows(
    tiles: Tiles,
    x_XK: Tensor,
    w_EKM: Tensor,
    offs_E: Tensor,
    order_N: Tensor | None = None,
    slots: int = 1,
    *,
    transposed: bool = False,
    add_NM: Tensor | None = None,
    gelu_into_NM: Tensor | None = None,
    gelu_of_NM: Tensor | None = None,
) -> Tensor:
    """Each row of x times its block's matrix, [N, M], bf16 or fp16.

    At most one follows: the sum with `add_NM`; GELU (its tanh form), what it is applied to stored
    in `gelu_into_NM`; or the product with GELU's derivative at `gelu_of_NM` (both contiguous).
    `transposed`: the matrices lie as [E, M, K].
    With `order_N` (a plan's) packed row n is row `order_N[n] // slots` of x. Sums are fp32.
    `offs_E` (int32) holds the last row + 1 of each block. Reads nothing on the host.
    """
    assert sum(t is not None for t in (add_NM, gelu_into_NM, gelu_of_NM)) <= 1
    rows, columns, depth, warps, stages, tma, resident = tiles[:7]
    # Addresses of gathered rows cannot be loaded ahead of the tile before them.
    resident = resident and order_N is None
    width_in, width_out = w_EKM.shape[1:][:: -1 if transposed else 1]
    n_blocks = w_EKM.shape[0]
    x_XK, w_EKM = x_XK.contiguous(), w_EKM.contiguous()
    n_rows = x_XK.shape[0] if order_N is None else order_N.shape[0]
    y_NM = torch.empty(n_rows, width_out, dtype=x_XK.dtype, device=x_XK.device)
    # Addresses and rows are multiples of 16 bytes. Beyond the last row or column zeros are copied,
    # but untransposed matrices must not end within a copy: the next one's rows would be summed.
    tma = (
        tma
        and (width_in % 8 == 0 if transposed else width_in % depth == 0)
        and width_out % 8 == 0
        and (x_XK.data_ptr() | w_EKM.data_ptr()) % 16 == 0
        and n_rows > 0
    )
    x, w = x_XK, w_EKM
    if tma:
        copied = [columns, depth] if transposed else [depth, columns]
        w = TensorDescriptor.from_tensor(w_EKM.flatten(0, 1), copied)
        if order_N is None:
            x = TensorDescriptor.from_tensor(x_XK, [rows, depth])
    # A block's last tile may be partly empty; programs beyond the last tile find nothing to do.
    programs = (n_rows // rows + n_blocks) * triton.cdiv(width_out, columns)
    if resident:
        programs = min(programs, _programs(x_XK.device))
    before = gelu_of_NM if gelu_into_NM is None else gelu_into_NM
    _grouped_rows[(programs,)](
        x, w, offs_E, order_N, None if add_NM is None else add_NM.contiguous(), before, y_NM,
        COUNT=n_blocks, PADDED=max(2, triton.next_power_of_2(n_blocks)), SLOTS=slots,
        TRANSPOSED=transposed, GELU=gelu_into_NM is not None, TMA=tma, RESIDENT=resident,
        K=width_in, M=width_out, ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return y_NM
