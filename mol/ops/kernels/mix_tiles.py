"""Tiles of rows and channels, and functions of them, around the gated delta rule."""

import triton
import triton.language as tl

TAPS = 4
EPS = tl.constexpr(1e-6)  # of the L2 norm
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_filters(filters, channel, inside):
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
def shifted(x, row, column, stride, mask, BY: tl.constexpr):
    """Tile of the rows `BY` below; masked elements are 0."""
    at = (row + BY)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def window(x, row, within, column, stride, alive, inside):
    """The rows themselves and 1, 2, 3 rows earlier in their segments."""
    now = shifted(x, row, column, stride, alive[:, None] & inside[None, :], 0)
    one = shifted(x, row, column, stride, (alive & (within >= 1))[:, None] & inside[None, :], -1)
    two = shifted(x, row, column, stride, (alive & (within >= 2))[:, None] & inside[None, :], -2)
    three = shifted(x, row, column, stride, (alive & (within >= 3))[:, None] & inside[None, :], -3)
    return now, one, two, three


@triton.jit
def silu(x):
    """x / (1 + e^-x) to 2^-21. Half the instructions of `tl.sigmoid`, whose division and power
    are made safe for results that are denormal: here those are 0."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return x * root * root


@triton.jit
def softplus(x):
    """log(1 + e^x) without overflow, and exact to rounding for e^x far below 1 (Kahan's log1p)."""
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    rest = one_more - 1.0
    ratio = tl.log(one_more) / tl.where(rest == 0.0, 1.0, rest)
    return tl.maximum(x, 0.0) + tl.where(rest == 0.0, small, ratio * small)


def sizes_of_heads(heads: int, width: int, elements: int) -> dict[str, int]:
    wide = triton.next_power_of_2(width)
    rows = max(1, min(128, elements // wide))
    everyone = triton.next_power_of_2(heads)
    return {"HEADS": heads, "ALL": everyone, "WIDTH": width, "WIDE": wide, "ROWS": rows}
