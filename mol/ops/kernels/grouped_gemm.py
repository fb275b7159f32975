"""The grouped product in Triton: rows sorted by block, each times its block's matrix.

What stands around a thin block's products is done in them: the rows may be gathered while they are
read, and GELU or an addition follows on the fp32 sums. `grouped_gemm` records no gradients;
`mol.ops.grouped_train` launches the same kernel forward and backward. Import this module on a
machine with Triton only; the same mathematics in PyTorch are `mol.ops.grouped`.

Shape suffixes: N packed rows, X rows of x (N, or the tokens), E blocks, K and M the widths.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mol.ops.kernels.operator import operator


class Tiles(NamedTuple):
    """How one shape is computed: `rows` x `columns` of y a program, `depth` of K at a time, of
    which `stages` are in flight; `tma`: matrices (and rows, if not gathered) are copied by the
    tensor memory accelerator; `resident`: programs stay for several tiles, and the next one's
    copies start before a tile is stored."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    resident: bool = False


# (gathered, K, M, GELU follows): ((from this many rows a block on, tiles), ...), in rising order.
# The fastest of 20 each on one H200, bf16, 14 blocks of 219 and 878 rows, of twelve for 7,022.
_WIDE = Tiles(128, 256, 64, 8, 3, tma=True, resident=True)
_FLAT = Tiles(64, 256, 64, 4, 4, tma=True)
MEASURED: dict[tuple[bool, int, int, bool], tuple[tuple[int, Tiles], ...]] = {
    (True, 2048, 512, False): ((0, _FLAT), (439, Tiles(128, 256, 64, 8, 4))),
    (False, 512, 2064, False): ((0, _WIDE),),
    (False, 512, 512, False): ((0, _FLAT), (439, _WIDE)),
    (False, 512, 2048, True): (
        (0, Tiles(128, 128, 64, 8, 3, tma=True)),
        (2483, _WIDE),
    ),
    (False, 512, 2048, False): ((0, _WIDE),),
    (False, 2048, 512, False): ((0, _FLAT), (439, Tiles(128, 128, 64, 4, 3, tma=True))),
}
FEW = 32  # rows a block, on the average, up to which the time is that of reading matrices
SMALL = Tiles(64, 128, 64, 4, 4, tma=True)
MEDIUM = Tiles(128, 128, 64, 8, 3, tma=True)
LARGE = Tiles(128, 256, 64, 8, 4, tma=True)


def tiles_for(
    gathered: bool, width_in: int, width_out: int, gelu: bool, n_rows: int, n_blocks: int
) -> Tiles:
    """Measured tiles for the shape, else by how many rows share a matrix."""
    rows_a_block = n_rows / n_blocks
    if rows_a_block <= FEW:
        return tiles_for_reading(width_out, n_blocks, rows_a_block)
    known = MEASURED.get((gathered, width_in, width_out, gelu), ())
    fitting = [tiles for start, tiles in known if rows_a_block >= start]
    if fitting:
        return fitting[-1]
    if rows_a_block < 96:
        return SMALL
    return LARGE if rows_a_block >= 2048 and width_out >= 256 else MEDIUM


def tiles_for_reading(width_out: int, n_blocks: int, rows_a_block: float) -> Tiles:
    """Tiles for a decode step of several sequences, which reads each matrix for a few rows.

    What counts is how many bytes are under way. 4.8 TB/s times a latency of 0.8 us are 3.8 MB, 29
    KB for each of an H200's 132 multiprocessors. A stage holds 8 KB of a matrix, so a program has
    three of them, 24 KB, under way: two programs a multiprocessor are enough, and with 40 to 96 KB
    of shared memory each, two fit. So columns are halved where 64 of them would leave fewer: 14
    blocks of 512 columns are 112 programs, or 224 of 32 columns (64 bytes of a line, two sectors).
    Splitting K instead would take another launch for the sums. Rows are twice the average, so that
    nearly every block is one tile; the copy for a second one comes from the L2 cache.
    """
    columns = 64 if n_blocks * width_out >= 64 * 2 * 132 else 32
    rows = min(64, max(16, triton.next_power_of_2(math.ceil(2 * rows_a_block))))
    return Tiles(rows, columns, 4096 // columns, 4, 4)


@triton.jit
def _blocks(offs, COUNT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """First row, last row + 1 and number of tiles of each block."""
    number = tl.arange(0, PADDED)
    known = number < COUNT
    end = tl.load(offs + number, mask=known, other=0)
    start = tl.load(offs + number - 1, mask=known & (number > 0), other=0)
    return start, end, tl.where(known, tl.cdiv(end - start, ROWS), 0)


@triton.jit
def _place(starts, ends, tiles, tile, ROWS: tl.constexpr):
    """Block, first row and the block's last row + 1 of one tile of rows."""
    number = tl.arange(0, tiles.shape[0])
    block = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    within = tile - tl.sum(tl.where(number < block, tiles, 0), 0)
    mine = number == block
    first = tl.sum(tl.where(mine, starts, 0), 0) + within * ROWS
    return block, first, tl.sum(tl.where(mine, ends, 0), 0)


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
    if GELU:
        if before is not None:
            tl.store(before + at, sums.to(before.dtype.element_ty), mask=mask)
        # x / 2 (1 + tanh u) is x / (1 + exp(-2 u)).
        twice = 1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
        sums = sums / (1.0 + tl.exp(-twice))
    if add is not None:
        sums += tl.load(add + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_gemm(
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


def _programs(device: torch.device) -> int:
    """One for each multiprocessor; in Triton's interpreter few enough to stay for several tiles."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    tiles: Tiles,
    x_XK: Tensor,
    w_EKM: Tensor,
    offs_E: Tensor,
    order_N: Tensor | None = None,
    slots: int = 1,
    gelu: bool = False,
    add_NM: Tensor | None = None,
    *,
    before_NM: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """`grouped_gemm` by given tiles; matrices that cannot be copied as they ask are loaded.

    What GELU is applied to is stored in `before_NM` (contiguous), if given. `transposed`: the
    matrices lie as [E, M, K].
    """
    rows, columns, depth, warps, stages, tma, resident = tiles
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
    _grouped_gemm[(programs,)](
        x, w, offs_E, order_N, None if add_NM is None else add_NM.contiguous(), before_NM, y_NM,
        COUNT=n_blocks, PADDED=max(2, triton.next_power_of_2(n_blocks)), SLOTS=slots,
        TRANSPOSED=transposed, GELU=gelu, TMA=tma, RESIDENT=resident, K=width_in, M=width_out,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y_NM


@operator("mol::grouped_gemm")
def grouped_gemm(
    x_XK: Tensor,
    w_EKM: Tensor,
    offs_E: Tensor,
    order_N: Tensor | None,
    slots: int,
    gelu: bool,
    add_NM: Tensor | None,
) -> Tensor:
    """Each row of x times its block's matrix, [N, M], bf16 or fp16.

    With `order_N` (a plan's) packed row n is row `order_N[n] // slots` of x. Then GELU (its tanh
    form) or the sum with `add_NM` follows; sums are fp32 and rounded once. `offs_E` (int32) holds
    the last row + 1 of each block. Reads nothing on the host.
    """
    assert not (gelu and add_NM is not None)
    rows = (x_XK if order_N is None else order_N).shape[0]
    n_blocks, *widths = w_EKM.shape
    tiles = tiles_for(order_N is not None, *widths, gelu, rows, n_blocks)
    large = tiles.tma or tiles.columns > 128
    if large and x_XK.is_cuda and torch.cuda.get_device_capability(x_XK.device)[0] < 9:
        tiles = MEDIUM._replace(tma=False)  # older GPUs have less shared memory, too
    return launch(tiles, x_XK, w_EKM, offs_E, order_N, slots, gelu, add_NM)


@grouped_gemm.register_fake
def _(
    x_XK: Tensor,
    w_EKM: Tensor,
    offs_E: Tensor,
    order_N: Tensor | None,
    slots: int,
    gelu: bool,
    add_NM: Tensor | None,
) -> Tensor:
    """What a compiler needs to know of it: shape and precision."""
    rows = x_XK if order_N is None else order_N
    return x_XK.new_empty(rows.shape[0], w_EKM.shape[2])
