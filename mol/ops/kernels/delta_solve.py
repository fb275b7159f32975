"""What the kernels of the gated delta rule share, and the first of them: a system for each chunk.

For the math see `mol.ops.kernels.delta`.

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
SEARCHED = 1024  # segments looked at together
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
SHARED_BYTES = 96 * 1024  # for prefetched rows, so that two programs fit one multiprocessor
TILE = tl.constexpr(16)


def shapes(k_NHd: Tensor, v_NHe: Tensor, cu_seqlens: Tensor) -> dict:
    """Constants of the kernels: widths, the next powers of two that a product takes, and how many
    segments are searched at a time."""
    (heads, width), value_width = k_NHd.shape[1:], v_NHe.shape[-1]
    assert max(width, value_width) <= 128, "one program holds a whole state"
    return {
        "HEADS": heads,
        "D": width,
        "E": value_width,
        "D_WIDE": max(16, triton.next_power_of_2(width)),
        "E_WIDE": max(16, triton.next_power_of_2(value_width)),
        "SEGMENTS": searched(cu_seqlens.numel() - 1),
        # Of the products of fp32 numbers, three TF32 ones for each. For bf16 inputs only T is
        # worked out in fp32 and then rounded to bf16: one TF32 product adds nothing to that.
        "PRECISION": "tf32" if k_NHd.dtype == torch.bfloat16 else "tf32x3",
    }


def searched(segments: int) -> int:
    """How many of the segments `find_chunk` looks at together."""
    return min(SEARCHED, triton.next_power_of_2(segments))


def chain_launch(sizes: dict, segments: int, beside: int, item_bytes: int) -> tuple:
    """Grid and constants of a kernel that goes through segments chunk by chunk, where a row of
    `beside` values is read with one of the state's columns."""
    heads, value_width = sizes["HEADS"], sizes["E"]
    # Halves of a state for few segments, so that every multiprocessor has a chain to follow.
    columns = min(sizes["E_WIDE"], 32 if segments * heads < PROGRAMS else 64)
    stage_bytes = CHUNK * (beside + columns) * item_bytes
    constants = {key: sizes[key] for key in ("HEADS", "D", "E", "D_WIDE", "PRECISION")}
    return (segments * heads * triton.cdiv(value_width, columns),), {
        **constants,
        "COLUMNS": columns,
        "STAGES": max(1, min(3, SHARED_BYTES // stage_bytes)),
        "num_warps": 4,
    }


@triton.jit
def find_chunk(cu_seqlens, slot, segments, SEGMENTS: tl.constexpr, ROWS: tl.constexpr = 64):
    """First row of the slot's chunk of ROWS rows, the end of its segment (int64; no chunk if not
    beyond the first), and the segment."""
    segment = -1
    for first in range(0, segments, SEGMENTS):
        s = first + tl.arange(0, SEGMENTS)
        start = tl.load(cu_seqlens + s, mask=s < segments, other=0)
        segment += tl.sum(((start // ROWS + s <= slot) & (s < segments)).to(tl.int32), 0)
    start = tl.load(cu_seqlens + segment).to(tl.int64)
    end = tl.load(cu_seqlens + segment + 1).to(tl.int64)
    return start + (slot - start // ROWS - segment) * ROWS, end, segment


@triton.jit
def load_rows(
    x, row, end, head, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, first=0,
):  # fmt: skip
    """[ROWS, WIDE] of one head of x [N, H, WIDTH] from column `first`, zero from row `end` on."""
    rows, column = row + tl.arange(0, ROWS), first + tl.arange(0, WIDE)
    mask = (rows < end)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + ((rows * HEADS + head) * WIDTH)[:, None] + column[None, :], mask, other=0.0)


@triton.jit
def flip_rows(
    x_c, x, row, end, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The transposed of a chunk's rows `x_c`, to be the first factor of a product.

    16-bit rows are flipped in shared memory, where the tensor cores read either order. fp32 would
    be flipped in registers, which a compiler for Hopper may get wrong (see `delta_backward`), so
    it is read once more, by columns.
    """
    if x_c.dtype == tl.float32:
        rows, column = row + tl.arange(0, 64), tl.arange(0, WIDE)
        mask = (column < WIDTH)[:, None] & (rows < end)[None, :]
        at = ((rows * HEADS + head) * WIDTH)[None, :] + column[:, None]
        return tl.load(x + at, mask, other=0.0)
    else:
        return tl.trans(x_c)


@triton.jit
def store_rows(
    x, values, row, end, head, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, first=0,
):  # fmt: skip
    rows, column = row + tl.arange(0, ROWS), first + tl.arange(0, WIDE)
    mask = (rows < end)[:, None] & (column < WIDTH)[None, :]
    at = ((rows * HEADS + head) * WIDTH)[:, None] + column[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask)


@triton.jit
def load_scalars(x, row, end, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS] of one head of x [N, H], in fp32, zero from row `end` on."""
    rows = row + tl.arange(0, ROWS)
    return tl.load(x + rows * HEADS + head, rows < end, other=0.0).to(tl.float32)


@triton.jit
def load_sums(decay, row, end, head, HEADS: tl.constexpr):
    """G of a chunk's 64 rows, and of its last. Rows from `end` on repeat the last, so that no
    ratio of two can overflow where the first is not earlier."""
    rows = tl.minimum(row + tl.arange(0, 64), end - 1)
    last = tl.load(decay + tl.minimum(row + 63, end - 1) * HEADS + head)
    return tl.load(decay + rows * HEADS + head), last


@triton.jit
def store_scalars(x, values, row, end, head, HEADS: tl.constexpr, ROWS: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    tl.store(x + rows * HEADS + head, values.to(x.dtype.element_ty), rows < end)


@triton.jit
def state_at(slot, head, first, D: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
             D_WIDE: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Offsets and mask of columns from `first` on in one state of [M or S, H, d, e]."""
    i, j = tl.arange(0, D_WIDE)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    return ((slot * HEADS + head) * D + i) * E + j, (i < D) & (j < E)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular tile.

    Inverts the diagonal blocks of 2, 4, 8 and 16 rows in turn. A power series in `a` would need as
    few products, but its terms grow like binomial coefficients when keys are alike and cancel;
    here every step is itself an inverse.
    """
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, 4):
        inside = (i >> (level + 1)) == (j >> (level + 1))
        below = tl.where(inside & ((i >> level) != (j >> level)), a, 0.0)
        x -= tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)
    return x


@triton.jit
def _coupling(k_i, k_j, decay_i, decay_j, beta_i, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of A."""
    ratio = decay_i[:, None] - decay_j[None, :]
    if DIAGONAL:
        below = tl.arange(0, TILE)[:, None] > tl.arange(0, TILE)[None, :]
        ratio = tl.where(below, ratio, -float("inf"))  # before exp, which would overflow
    product = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION)
    return product * tl.exp(ratio) * beta_i[:, None]


@triton.jit
def _mix(t, scale, x, PRECISION: tl.constexpr):
    """A tile of T, its columns scaled, times rows of k or v."""
    return tl.dot((t * scale[None, :]).to(x.dtype), x, input_precision=PRECISION)


@triton.jit
def _four_rows(x, row, end, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """A chunk's rows of one head as four tiles."""
    return (
        load_rows(x, row, end, head, HEADS, WIDTH, TILE, WIDE),
        load_rows(x, row + TILE, end, head, HEADS, WIDTH, TILE, WIDE),
        load_rows(x, row + 2 * TILE, end, head, HEADS, WIDTH, TILE, WIDE),
        load_rows(x, row + 3 * TILE, end, head, HEADS, WIDTH, TILE, WIDE),
    )


@triton.jit
def _four_scalars(x, row, end, head, HEADS: tl.constexpr):
    return (
        load_scalars(x, row, end, head, HEADS, TILE),
        load_scalars(x, row + TILE, end, head, HEADS, TILE),
        load_scalars(x, row + 2 * TILE, end, head, HEADS, TILE),
        load_scalars(x, row + 3 * TILE, end, head, HEADS, TILE),
    )


@triton.jit
def _four_sums(g_0, g_1, g_2, g_3):
    """G of a chunk: the running sum through the four tiles."""
    before_1 = tl.sum(g_0, 0)
    before_2 = before_1 + tl.sum(g_1, 0)
    before_3 = before_2 + tl.sum(g_2, 0)
    return (
        tl.cumsum(g_0, 0),
        before_1 + tl.cumsum(g_1, 0),
        before_2 + tl.cumsum(g_2, 0),
        before_3 + tl.cumsum(g_3, 0),
    )


@triton.jit
def _store_product(
    y, x, t_00, t_10, t_11, t_20, t_21, t_22, t_30, t_31, t_32, t_33,
    scale_0, scale_1, scale_2, scale_3, row, end, head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = T diag(scale) x. The scale goes into T's columns: x then needs no second rounding."""
    x_0, x_1, x_2, x_3 = _four_rows(x, row, end, head, HEADS, WIDTH, WIDE)
    y_0 = _mix(t_00, scale_0, x_0, PRECISION)
    store_rows(y, y_0, row, end, head, HEADS, WIDTH, TILE, WIDE)
    y_1 = _mix(t_10, scale_0, x_0, PRECISION) + _mix(t_11, scale_1, x_1, PRECISION)
    store_rows(y, y_1, row + TILE, end, head, HEADS, WIDTH, TILE, WIDE)
    y_2 = _mix(t_20, scale_0, x_0, PRECISION) + _mix(t_21, scale_1, x_1, PRECISION)
    y_2 += _mix(t_22, scale_2, x_2, PRECISION)
    store_rows(y, y_2, row + 2 * TILE, end, head, HEADS, WIDTH, TILE, WIDE)
    y_3 = _mix(t_30, scale_0, x_0, PRECISION) + _mix(t_31, scale_1, x_1, PRECISION)
    y_3 += _mix(t_32, scale_2, x_2, PRECISION) + _mix(t_33, scale_3, x_3, PRECISION)
    store_rows(y, y_3, row + 3 * TILE, end, head, HEADS, WIDTH, TILE, WIDE)


@triton.jit
def _store_t(t, row_t0, row_t1, row_t2, row_t3, row, end, head, HEADS: tl.constexpr):
    """Sixteen rows of T, [N, H, 64]."""
    store_rows(t, row_t0, row, end, head, HEADS, 64, TILE, TILE, 0)
    store_rows(t, row_t1, row, end, head, HEADS, 64, TILE, TILE, 16)
    store_rows(t, row_t2, row, end, head, HEADS, 64, TILE, TILE, 32)
    store_rows(t, row_t3, row, end, head, HEADS, 64, TILE, TILE, 48)


@triton.jit(do_not_specialize=["segments"])
def solve(
    k, v, g, beta, cu_seqlens, decay, t, w, u, segments,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_WIDE: tl.constexpr,
    E_WIDE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, KEEP_T: tl.constexpr,
):  # fmt: skip
    """One chunk of one head as 4 x 4 tiles of 16: G, T (if kept), W and U.

    Meant for two warps: a tile is two tensor core instructions wide and one high, one warp spills.
    """
    head = tl.program_id(0) % HEADS
    row, end, _ = find_chunk(cu_seqlens, tl.program_id(0) // HEADS, segments, SEGMENTS)
    if row >= end:
        return
    k_0, k_1, k_2, k_3 = _four_rows(k, row, end, head, HEADS, D, D_WIDE)
    beta_0, beta_1, beta_2, beta_3 = _four_scalars(beta, row, end, head, HEADS)
    g_0, g_1, g_2, g_3 = _four_scalars(g, row, end, head, HEADS)
    sum_0, sum_1, sum_2, sum_3 = _four_sums(g_0, g_1, g_2, g_3)
    store_scalars(decay, sum_0, row, end, head, HEADS, TILE)
    store_scalars(decay, sum_1, row + TILE, end, head, HEADS, TILE)
    store_scalars(decay, sum_2, row + 2 * TILE, end, head, HEADS, TILE)
    store_scalars(decay, sum_3, row + 3 * TILE, end, head, HEADS, TILE)

    t_00 = _inverse(_coupling(k_0, k_0, sum_0, sum_0, beta_0, True, PRECISION), PRECISION)
    t_11 = _inverse(_coupling(k_1, k_1, sum_1, sum_1, beta_1, True, PRECISION), PRECISION)
    t_22 = _inverse(_coupling(k_2, k_2, sum_2, sum_2, beta_2, True, PRECISION), PRECISION)
    t_33 = _inverse(_coupling(k_3, k_3, sum_3, sum_3, beta_3, True, PRECISION), PRECISION)
    # Row i of T from the rows above it: T_ij = -T_ii (A_ij T_jj + ... + A_i,i-1 T_i-1,j).
    a_10 = _coupling(k_1, k_0, sum_1, sum_0, beta_1, False, PRECISION)
    t_10 = -_dot(t_11, _dot(a_10, t_00, PRECISION), PRECISION)
    a_20 = _coupling(k_2, k_0, sum_2, sum_0, beta_2, False, PRECISION)
    a_21 = _coupling(k_2, k_1, sum_2, sum_1, beta_2, False, PRECISION)
    t_21 = -_dot(t_22, _dot(a_21, t_11, PRECISION), PRECISION)
    right = _dot(a_20, t_00, PRECISION) + _dot(a_21, t_10, PRECISION)
    t_20 = -_dot(t_22, right, PRECISION)
    a_30 = _coupling(k_3, k_0, sum_3, sum_0, beta_3, False, PRECISION)
    a_31 = _coupling(k_3, k_1, sum_3, sum_1, beta_3, False, PRECISION)
    a_32 = _coupling(k_3, k_2, sum_3, sum_2, beta_3, False, PRECISION)
    t_32 = -_dot(t_33, _dot(a_32, t_22, PRECISION), PRECISION)
    right = _dot(a_31, t_11, PRECISION) + _dot(a_32, t_21, PRECISION)
    t_31 = -_dot(t_33, right, PRECISION)
    right = _dot(a_30, t_00, PRECISION) + _dot(a_31, t_10, PRECISION)
    right += _dot(a_32, t_20, PRECISION)
    t_30 = -_dot(t_33, right, PRECISION)

    if KEEP_T:
        zero = tl.zeros([TILE, TILE], tl.float32)
        _store_t(t, t_00, zero, zero, zero, row, end, head, HEADS)
        _store_t(t, t_10, t_11, zero, zero, row + TILE, end, head, HEADS)
        _store_t(t, t_20, t_21, t_22, zero, row + 2 * TILE, end, head, HEADS)
        _store_t(t, t_30, t_31, t_32, t_33, row + 3 * TILE, end, head, HEADS)
    _store_product(
        w, k, t_00, t_10, t_11, t_20, t_21, t_22, t_30, t_31, t_32, t_33,
        beta_0 * tl.exp(sum_0), beta_1 * tl.exp(sum_1), beta_2 * tl.exp(sum_2),
        beta_3 * tl.exp(sum_3), row, end, head, HEADS, D, D_WIDE, PRECISION,
    )  # fmt: skip
    _store_product(
        u, v, t_00, t_10, t_11, t_20, t_21, t_22, t_30, t_31, t_32, t_33,
        beta_0, beta_1, beta_2, beta_3, row, end, head, HEADS, E, E_WIDE, PRECISION,
    )  # fmt: skip
