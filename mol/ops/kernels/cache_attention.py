"""Triton kernels of one row against each segment's cache, whose time is that of reading the cache.

Whatever grows with the text is read on the device, so a CUDA graph can hold the calls. Import this
module on a machine with Triton only. No gradients.

Shape suffixes: N rows, S segments, H heads, L cache length, d head width, P parts of a cache read
side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # wanted at once: about four for each multiprocessor of an H100 or H200


@triton.jit
def _append(
    k, v, keys, values, segment, used, k_head, k_row,
    HEADS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row's keys and values behind those its segment holds, all heads, and count it."""
    row = tl.program_id(0)
    mine = tl.load(segment + row)
    held = tl.load(used + mine)
    head, column = tl.arange(0, ALL)[:, None], tl.arange(0, WIDE)[None, :]
    mask = (head < HEADS) & (column < WIDTH)
    at = (mine * HEADS + head) * k_head + held * k_row + column
    source = (row * HEADS + head) * WIDTH + column
    tl.store(keys + at, tl.load(k + source, mask=mask), mask=mask)
    tl.store(values + at, tl.load(v + source, mask=mask), mask=mask)
    tl.store(used + mine, held + 1)


@triton.jit
def _attend_part(
    q, k, v, segment, used, best, total, part_o,
    scale, k_head, k_row, HEADS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of one row, head and part of the cache: softmax numerators, their sum, the maximum."""
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    mine = tl.load(segment + row)
    held = tl.load(used + mine)
    share = tl.cdiv(tl.cdiv(held, PARTS), ROWS) * ROWS
    first = part * share
    last = tl.minimum(first + share, held)
    at_head = (mine * HEADS + head) * k_head
    at_row = row * HEADS + head
    query = tl.load(q + at_row * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    highest = -float("inf")
    weight = 0.0
    sums = tl.zeros([WIDE], dtype=tl.float32)
    for start in range(first, last, ROWS):
        cached = start + tl.arange(0, ROWS)
        alive = cached < last
        at = at_head + cached[:, None] * k_row + column[None, :]
        mask = alive[:, None] & inside[None, :]
        keys = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(alive, tl.sum(keys * query[None, :], 1), -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 0))
        p = tl.exp(scores - now)
        values = tl.load(v + at, mask=mask, other=0.0).to(tl.float32)
        shrink = tl.exp(highest - now)
        weight = weight * shrink + tl.sum(p, 0)
        sums = sums * shrink + tl.sum(values * p[:, None], 0)
        highest = now
    slot = at_row * PARTS + part
    tl.store(best + slot, highest)
    tl.store(total + slot, weight)
    tl.store(part_o + slot * WIDTH + column, sums, mask=inside)


@triton.jit
def _join_parts(
    best, total, part_o, o, PARTS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):
    """Softmax over all parts; an empty one has maximum -inf and weighs exp(-inf) = 0."""
    mine = tl.program_id(0)
    slot, column = mine * PARTS + tl.arange(0, PARTS), tl.arange(0, WIDE)
    inside = column < WIDTH
    highest = tl.load(best + slot)
    scale = tl.exp(highest - tl.max(highest, 0))
    weight = tl.sum(tl.load(total + slot) * scale, 0)
    at = slot[:, None] * WIDTH + column[None, :]
    sums = tl.sum(tl.load(part_o + at, mask=inside[None, :], other=0.0) * scale[:, None], 0)
    tl.store(o + mine * WIDTH + column, (sums / weight).to(o.dtype.element_ty), mask=inside)


def step_in_cache(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    keys_SHLd: Tensor,
    values_SHLd: Tensor,
    segment_N: Tensor,
    used_S: Tensor,
) -> Tensor:
    """Append row n to segment `segment_N[n]` (distinct) and attend to all it then holds, [N, H, d].

    Changes the caches and `used_S` (both index tensors int64). The caches are contiguous; L bounds
    memory, not time. Sums are fp32.
    """
    n_rows, heads, width = q_NHd.shape
    wide = triton.next_power_of_2(width)
    parts = triton.next_power_of_2(max(1, min(64, PROGRAMS // (n_rows * heads))))
    best = torch.empty(n_rows * heads, parts, dtype=torch.float32, device=q_NHd.device)
    total = torch.empty_like(best)
    part_o = torch.empty(*best.shape, width, dtype=torch.float32, device=q_NHd.device)
    o_NHd = torch.empty(q_NHd.shape, dtype=q_NHd.dtype, device=q_NHd.device)
    strides = keys_SHLd.stride()[1:3]
    _append[(n_rows,)](
        k_NHd.contiguous(), v_NHd.contiguous(), keys_SHLd, values_SHLd, segment_N, used_S,
        *strides, HEADS=heads, ALL=triton.next_power_of_2(heads), WIDTH=width, WIDE=wide,
    )  # fmt: skip
    _attend_part[(heads, parts, n_rows)](
        q_NHd.contiguous(), keys_SHLd, values_SHLd, segment_N, used_S, best, total, part_o,
        width**-0.5, *strides, HEADS=heads, PARTS=parts, WIDTH=width, WIDE=wide, ROWS=64,
    )  # fmt: skip
    _join_parts[(n_rows * heads,)](best, total, part_o, o_NHd, PARTS=parts, WIDTH=width, WIDE=wide)
    return o_NHd
