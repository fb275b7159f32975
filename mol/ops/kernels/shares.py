"""How the kernels over packed rows divide their work: each program takes a part of one block.

Rows are sorted by block, so a program reads its block's weights once, and the parts of a block
give the partial sums of its weight gradients without atomics. Nothing is read on the host.

Shape suffixes: N packed rows, E blocks, P parts of a block.
"""

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # about eight for each multiprocessor of an H100 or H200
TILES = 8  # most tiles a program: weights are read once for them, and no program runs long


def count_parts(n_rows: int, n_blocks: int, tile: int, across: int = 1) -> int:
    """Parts of each block when tiles hold `tile` rows and each part takes `across` programs.

    A program of an average block has one tile until there are enough programs, then up to TILES.
    """
    tiles = triton.cdiv(n_rows, tile)
    tiles_a_program = min(TILES, max(1, tiles * across // PROGRAMS))
    return max(1, triton.cdiv(n_rows, n_blocks * tile * tiles_a_program))


@triton.jit
def block_share(offs, block, part, parts, TILE: tl.constexpr):
    """First row and last row + 1 of one part of a block, whole tiles but for the block's last."""
    start = tl.load(offs + block - 1, mask=block > 0, other=0)
    end = tl.load(offs + block)
    share = tl.cdiv(tl.cdiv(end - start, parts), TILE) * TILE
    first = start + part * share
    return first, tl.minimum(first + share, end)


def row_strided(x: Tensor) -> Tensor:
    """`x` itself if the last dimension is contiguous (rows may lie apart), else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
