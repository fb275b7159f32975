"""Triton kernels of a decode step's attention: rows against their caches, and the product after it.

`mix` serves the softmax rows and the gated-delta rows of a split stage in one launch. A cache is
read in parts side by side, whose numbers the host fixes and whose lengths follow on the device from
how much a segment holds; `attended` joins them while it loads its input. Rows, groups and the
layout between kernels are those of `mol.ops.kernels.decode`.

Shape suffixes: N rows, S segments, H heads, L cache length, d head width, P parts, Z width of the
projection's output.
"""

import triton
import triton.language as tl

from mol.ops.kernels.decode_parts import group_of, product, tile_of, wait_for_inputs
from mol.ops.kernels.delta_step import head_step


@triton.jit
def _share(count, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Rows of each part of a cache that holds `count` with the new one."""
    return tl.cdiv(tl.cdiv(count, PARTS), ROWS) * ROWS


@triton.jit
def _rotated(x, column, cos, sin, WIDTH: tl.constexpr):
    """A head's vector turned to the position whose tables' rows are given."""
    half: tl.constexpr = WIDTH // 2
    low, inside = column < half, column < WIDTH
    plane = tl.where(low, column, column - half)
    other = tl.where(low, column + half, plane)
    mine = tl.load(x + column, mask=inside, other=0.0)
    partner = tl.load(x + other, mask=inside, other=0.0)
    turned = mine * tl.load(cos + plane, mask=inside, other=0.0)
    return turned + tl.where(low, -partner, partner) * tl.load(sin + plane, mask=inside, other=0.0)


@triton.jit
def _attend(
    z, keys, values, used, segment, slot, part, head, cos, sin, best, total, part_o, scale, room,
    HEADS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Of one row, head and part: softmax numerators, their sum, the maximum. The part that the new
    row falls into appends it to the cache. Parts without a row write nothing."""
    held = tl.load(used + segment)
    share = _share(held + 1, PARTS, ROWS)
    first = part * share
    if first <= held:
        last = tl.minimum(first + share, held)
        column = tl.arange(0, WIDE)
        inside, line = column < WIDTH, tl.arange(0, ROWS)
        base = (segment * HEADS + head) * room * WIDTH
        at = base + (first + line)[:, None] * WIDTH + column[None, :]
        mask = (first + line < last)[:, None] & inside[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        value = tl.load(values + at, mask=mask, other=0.0)
        query = _rotated(z + head * WIDTH, column, cos, sin, WIDTH) * scale
        # A maximum and a sum for each line of the tile: nothing crosses warps inside the loop. The
        # start is finite, so that a line that sees no row yields no NaN.
        highest = tl.full([ROWS], -1e30, dtype=tl.float32)
        weight = tl.zeros([ROWS], dtype=tl.float32)
        sums = tl.zeros([ROWS, WIDE], dtype=tl.float32)
        for start in range(first, last, ROWS):
            at += ROWS * WIDTH
            mask = (start + ROWS + line < last)[:, None] & inside[None, :]
            next_key = tl.load(keys + at, mask=mask, other=0.0)
            next_value = tl.load(values + at, mask=mask, other=0.0)
            scores = tl.sum(key.to(tl.float32) * query[None, :], 1)
            scores = tl.where(start + line < last, scores, -float("inf"))
            now = tl.maximum(highest, scores)
            p, shrink = tl.exp(scores - now), tl.exp(highest - now)
            weight = weight * shrink + p
            sums = sums * shrink[:, None] + value.to(tl.float32) * p[:, None]
            highest, key, value = now, next_key, next_value
        mine = inside & (held < first + share)
        # As later steps will see them: rounded to the cache's precision.
        new_key = _rotated(z + (HEADS + head) * WIDTH, column, cos, sin, WIDTH)
        new_key = new_key.to(keys.dtype.element_ty)
        new_value = tl.load(z + (2 * HEADS + head) * WIDTH + column, mask=inside, other=0.0)
        new_value = new_value.to(values.dtype.element_ty)
        tl.store(keys + base + held * WIDTH + column, new_key, mask=mine)
        tl.store(values + base + held * WIDTH + column, new_value, mask=mine)
        score = tl.sum(query * new_key.to(tl.float32), 0)
        score = tl.where(held < first + share, score, -float("inf"))
        top = tl.maximum(tl.max(highest, 0), score)
        shrink, p = tl.exp(highest - top), tl.exp(score - top)
        joined = tl.sum(sums * shrink[:, None], 0) + p * new_value.to(tl.float32)
        tl.store(best + slot, top)
        tl.store(total + slot, tl.sum(weight * shrink, 0) + p)
        tl.store(part_o + slot * WIDTH + column, joined, mask=inside)


@triton.jit(do_not_specialize=["position", "room"])
def mix(
    z, block, keys_shared, values_shared, used_shared, keys_routed, values_routed, used_routed,
    tail, state, filters, decay_log, dt_bias, norm, cos, sin, position, mixed, best, total, part_o,
    scale, eps, room,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, Z: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    DELTA: tl.constexpr, ON_DEVICE: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: (row, head) of the gated-delta rows, then (row, head, part) of the softmax rows."""
    wait_for_inputs(PDL)
    M: tl.constexpr = HEADS * WIDTH
    recurrent: tl.constexpr = DELTA * B * SLOTS * HEADS
    program = tl.program_id(0)
    if program < recurrent:
        pair, head = program // HEADS, program % HEADS
        number = tl.load(block + pair).to(tl.int64)
        segment, row = number * B + pair // SLOTS, S * B + pair
        if DELTA:
            head_step(
                z + row * Z, tail + segment * (9 * M), state + segment * (M * WIDTH),
                filters + number * (12 * M), decay_log + number * HEADS, dt_bias + number * HEADS,
                norm + number * WIDTH, mixed + row * M, head, scale, eps, HEADS, WIDTH, WIDE,
            )  # fmt: skip
    else:
        program -= recurrent
        part, head, row = program % PARTS, program // PARTS % HEADS, program // (PARTS * HEADS)
        slot = (row * HEADS + head) * PARTS + part
        token = tl.where(row < S * B, row % B, (row - S * B) // max(1, SLOTS))
        time = position
        if ON_DEVICE:
            time = tl.load(position + token * EACH)
        cos += time * (WIDTH // 2)
        sin += time * (WIDTH // 2)
        if row < S * B:
            if S:
                _attend(
                    z + row * Z, keys_shared, values_shared, used_shared, row.to(tl.int64), slot,
                    part, head, cos, sin, best, total, part_o, scale, room,
                    HEADS, PARTS, WIDTH, WIDE, ROWS,
                )  # fmt: skip
        elif not DELTA:
            pair = row - S * B
            segment = tl.load(block + pair).to(tl.int64) * B + pair // SLOTS
            _attend(
                z + row * Z, keys_routed, values_routed, used_routed, segment, slot, part, head,
                cos, sin, best, total, part_o, scale, room, HEADS, PARTS, WIDTH, WIDE, ROWS,
            )  # fmt: skip


@triton.jit
def _joined(
    best, total, part_o, held, row, k, inside, HEADS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Columns k of a row's attention over all the parts that hold something."""
    alive = tl.cdiv(held + 1, _share(held + 1, PARTS, ROWS))
    head, number = row * HEADS + k // WIDTH, tl.arange(0, AT_ONCE)
    highest = tl.full([DEEP], -1e30, dtype=tl.float32)
    weight = tl.zeros([DEEP], dtype=tl.float32)
    sums = tl.zeros([DEEP], dtype=tl.float32)
    for first in range(0, alive, AT_ONCE):
        mask = (first + number < alive)[:, None] & inside[None, :]
        at = head[None, :] * PARTS + first + number[:, None]
        tops = tl.load(best + at, mask=mask, other=-float("inf"))
        weights = tl.load(total + at, mask=mask, other=0.0)
        o = tl.load(part_o + at * WIDTH + (k % WIDTH)[None, :], mask=mask, other=0.0)
        now = tl.maximum(highest, tl.max(tops, 0))
        p, shrink = tl.exp(tops - now[None, :]), tl.exp(highest - now)
        weight = weight * shrink + tl.sum(weights * p, 0)
        sums = sums * shrink + tl.sum(o * p, 0)
        highest = now
    return sums / tl.where(inside, weight, 1.0)


@triton.jit
def attended(
    block, mixed, best, total, part_o, used_shared, used_routed, w_shared, w_routed, bias_shared,
    bias_routed, parts, stride,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    DELTA: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts, then partial products [P, N, M] with the output matrix, plus bias."""
    M: tl.constexpr = HEADS * WIDTH
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows, number = group_of(block, group, B, S)
    if group < S:
        w = w_shared + number * M * M
    else:
        w = w_routed + number * M * M
    w_tile = tile_of(w, split * DEEP, tile, M, M, DEEP, COLUMNS)
    k, column = split * DEEP + tl.arange(0, DEEP), tile * COLUMNS + tl.arange(0, COLUMNS)
    inside, written = k < M, column < M
    wait_for_inputs(PDL)
    for row in range(first, first + rows):
        x = tl.zeros([DEEP], dtype=tl.float32)
        bias = tl.zeros([COLUMNS], dtype=tl.float32)
        if S:
            if group < S:
                held = tl.load(used_shared + row)
                x = _joined(
                    best, total, part_o, held, row, k, inside, HEADS, PARTS, WIDTH, ROWS, DEEP,
                    AT_ONCE,
                )  # fmt: skip
                at = bias_shared + number * M + column
                bias = tl.load(at, mask=written, other=0.0).to(tl.float32)
        if SLOTS:
            if group >= S:
                if DELTA:
                    x = tl.load(mixed + row * M + k, mask=inside, other=0.0)
                else:
                    held = tl.load(used_routed + number * B + (group - S) // SLOTS)
                    x = _joined(
                        best, total, part_o, held, row, k, inside, HEADS, PARTS, WIDTH, ROWS, DEEP,
                        AT_ONCE,
                    )  # fmt: skip
                    at = bias_routed + number * M + column
                    bias = tl.load(at, mask=written, other=0.0).to(tl.float32)
        y = product(w_tile, x)
        if split == 0:
            y += bias
        tl.store(parts + split * stride + row * M + column, y, mask=written)
