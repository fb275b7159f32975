"""Triton products of a decode step: a handful of rows, each times its own block's matrix.

Their time is that of reading weights, so a program takes one tile of one matrix, all of it in
flight at once, and what comes between two products (norm, bias, GELU, sums of partial products) is
repeated by each program that needs it in place of a launch of its own. A product over a long width
is split over programs, whose partial sums the next kernel adds while it loads them.

Rows: the first S * B are those of the S shared blocks (block * B + token), then B * k of the
routed ones (token * k + slot). A "group" is the rows of one matrix: B for a shared block, one for
a routed slot. Between kernels everything is fp32. No gradients.

Shape suffixes: N rows, B tokens, D = d_model, M width of a block, F its inner width, E routed
blocks, P partial sums.
"""

import triton
import triton.language as tl

from mol.ops.kernels.decode_parts import (
    group_of,
    normed,
    product,
    sum_parts,
    tile_of,
    wait_for_inputs,
)


@triton.jit
def _route(
    x, router, slot, D: tl.constexpr, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, ALL: tl.constexpr, RENORMALIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Block of a token's slot and its weight; with ALL slots are blocks, and those that are not
    among the chosen weigh 0. Each program that asks computes the same bits."""
    block = tl.arange(0, EXPERTS)
    score = tl.zeros([EXPERTS], dtype=tl.float32)
    for first in range(0, D, CHUNK):
        k = first + tl.arange(0, CHUNK)
        mask = (block < BLOCKS)[:, None] & (k < D)[None, :]
        part = tl.load(router + block[:, None] * D + k[None, :], mask=mask, other=0.0)
        row = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
        score += tl.sum(part.to(tl.float32) * row[None, :], 1)
    score = tl.where(block < BLOCKS, score, -float("inf"))
    p = tl.exp(score - tl.max(score, 0))
    left = p / tl.sum(p, 0)
    number, weight, total = slot, 0.0, 0.0
    for turn in range(TOP_K):
        best = tl.max(left, 0)
        # With NaN no probability equals the best: name a block that exists all the same.
        at = tl.min(tl.where(left == best, block, BLOCKS - 1), 0)
        total += best
        if ALL:
            weight = tl.where(at == slot, best, weight)
        else:
            number = tl.where(turn == slot, at, number)
            weight = tl.where(turn == slot, best, weight)
        left = tl.where(block == at, -1.0, left)
    if RENORMALIZE:
        weight = weight / total
    return number, weight


@triton.jit
def down(
    x, router, w_shared, w_routed, block, weight, parts, stride,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROUTER: tl.constexpr, ALL: tl.constexpr,
    RENORMALIZE: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    DEEP: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route the token (again in each program: cheaper than a launch), then x times W_down.
    Notes block and weight of each pair; writes partial products [P, N, M]."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(PDL)
    if group < S:
        w = w_shared + group.to(tl.int64) * D * M
        first_row, rows, first_token = group * B, group * 0 + B, group * 0
    else:
        pair = group - S
        first_row, rows, first_token = S * B + pair, group * 0 + 1, pair // SLOTS
        number, share = pair % SLOTS, 1.0
        if ROUTER:
            number, share = _route(
                x + first_token * D, router, number, D, BLOCKS, EXPERTS, TOP_K, ALL, RENORMALIZE,
                CHUNK,
            )  # fmt: skip
        if (tile == 0) & (split == 0):
            tl.store(block + pair, number)
            tl.store(weight + pair, share)
        w = w_routed + number.to(tl.int64) * D * M
    w_tile = tile_of(w, split * DEEP, tile, D, M, DEEP, COLUMNS)
    k, column = split * DEEP + tl.arange(0, DEEP), tile * COLUMNS + tl.arange(0, COLUMNS)
    for i in range(rows):
        row = tl.load(x + (first_token + i) * D + k, mask=k < D, other=0.0).to(tl.float32)
        to = parts + split * stride + (first_row + i) * M + column
        tl.store(to, product(w_tile, row), mask=column < M)


@triton.jit
def _project(
    parts, stride, norm, norm_bias, w, bias, h, z, first_row, rows, tile, eps,
    K: tl.constexpr, M: tl.constexpr, Z: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    LAYER: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    w_tile = tile_of(w, 0, tile, K, M, DEEP, COLUMNS)
    k, column = tl.arange(0, DEEP), tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < K
    for row in range(first_row, first_row + rows):
        total = sum_parts(parts, stride, row, k, inside, K, PARTS)
        if tile == 0:
            tl.store(h + row * K + k, total, mask=inside)
        y = product(w_tile, normed(total, inside, k, norm, norm_bias, eps, K, LAYER))
        if BIAS:
            y += tl.load(bias + column, mask=column < M, other=0.0).to(tl.float32)
        tl.store(z + row * Z + column, y, mask=column < M)


@triton.jit
def project(
    parts, stride, block, norm_shared, norm_routed, norm_bias, w_shared, w_routed, bias_shared,
    bias_routed, h, z, eps,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    M_SHARED: tl.constexpr, M_ROUTED: tl.constexpr, Z: tl.constexpr, PARTS: tl.constexpr,
    DELTA: tl.constexpr, LAYER: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h = sum of `parts` [P, N, K], kept; norm(h) times the attention's input matrix, plus bias."""
    group, tile = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    first, rows, number = group_of(block, group, B, S)
    # Two calls, as widths known at compile time are what lets the loads be wide.
    if S:
        if (group < S) & (tile * COLUMNS < M_SHARED):
            _project(
                parts, stride, norm_shared + number * K, norm_bias,
                w_shared + number * K * M_SHARED, bias_shared + number * M_SHARED, h, z, first,
                rows, tile, eps, K, M_SHARED, Z, PARTS, True, LAYER, DEEP, COLUMNS,
            )  # fmt: skip
    if SLOTS:
        if (group >= S) & (tile * COLUMNS < M_ROUTED):
            _project(
                parts, stride, norm_routed + number * K, norm_bias,
                w_routed + number * K * M_ROUTED, bias_routed + number * M_ROUTED, h, z, first,
                rows, tile, eps, K, M_ROUTED, Z, PARTS, not DELTA, LAYER, DEEP, COLUMNS,
            )  # fmt: skip


@triton.jit
def ffn_in(
    h, attended, stride, block, norm_shared, norm_routed, norm_bias, w_shared, w_routed,
    used_shared, used_routed, sums, f, eps,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    PARTS: tl.constexpr, DELTA: tl.constexpr, LAYER: tl.constexpr, DEEP: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """f = GELU(norm(h + attended) W_in), [N, M]; `sums` keeps the sum of the P `attended`. Counts
    the rows that attention appended to caches: all who asked for the old count are done."""
    group, tile = tl.program_id(0), tl.program_id(1)
    first, rows, number = group_of(block, group, B, S)
    if group < S:
        w, norm = w_shared + number * K * M, norm_shared + number * K
    else:
        w, norm = w_routed + number * K * M, norm_routed + number * K
    w_tile = tile_of(w, 0, tile, K, M, DEEP, COLUMNS)
    k, column = tl.arange(0, DEEP), tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < K
    wait_for_inputs(PDL)
    for row in range(first, first + rows):
        added = sum_parts(attended, stride, row, k, inside, K, PARTS)
        if tile == 0:
            tl.store(sums + row * K + k, added, mask=inside)
            if S:
                if group < S:
                    tl.store(used_shared + row, tl.load(used_shared + row) + 1)
            if SLOTS and not DELTA:
                if group >= S:
                    counter = used_routed + number * B + (group - S) // SLOTS
                    tl.store(counter, tl.load(counter) + 1)
        total = added + tl.load(h + row * K + k, mask=inside, other=0.0).to(tl.float32)
        y = product(w_tile, normed(total, inside, k, norm, norm_bias, eps, K, LAYER))
        # GELU's tanh form: (1 + tanh u) / 2 = sigmoid(2 u).
        y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
        tl.store(f + row * M + column, y, mask=column < M)


@triton.jit
def ffn_out(
    f, block, w_shared, w_routed, parts, stride,
    B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, M: tl.constexpr, DEEP: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial products [P, N, M] of f with W_out."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows, number = group_of(block, group, B, S)
    if group < S:
        w = w_shared + number * K * M
    else:
        w = w_routed + number * K * M
    w_tile = tile_of(w, split * DEEP, tile, K, M, DEEP, COLUMNS)
    k, column = split * DEEP + tl.arange(0, DEEP), tile * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    for row in range(first, first + rows):
        values = tl.load(f + row * K + k, mask=k < K, other=0.0)
        to = parts + split * stride + row * M + column
        tl.store(to, product(w_tile, values), mask=column < M)


@triton.jit
def _stacked_tile(
    w, blocks, first, column, COUNT: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    CHOSEN: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + DEEP of COUNT matrices laid one below the other: those of `blocks`,
    or the first ones."""
    at = first + tl.arange(0, DEEP)
    slot = at // K
    inside = at < COUNT * K
    number = slot
    if CHOSEN:
        number = tl.load(blocks + slot, mask=inside, other=0)
    line = number.to(tl.int64) * K + at % K
    mask = inside[:, None] & (column < M)[None, :]
    return tl.load(w + line[:, None] * M + column[None, :], mask=mask, other=0.0)


@triton.jit
def _stacked_values(
    values, parts, stride, weights, first, row, step, COUNT: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, CHOSEN: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """What those rows are multiplied by: values plus their parts, times the slot's weight."""
    at = first + tl.arange(0, DEEP)
    slot, inside = at // K, at < COUNT * K
    source = (row + slot * step) * K + at % K
    x = tl.load(values + source, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        x += tl.load(parts + part * stride + source, mask=inside, other=0.0)
    if CHOSEN:
        x *= tl.load(weights + slot, mask=inside, other=0.0)
    return x


@triton.jit
def up(
    x, added, values, parts, stride, block, weight, w_shared, w_routed, y, scale_shared,
    scale_routed,
    B: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    PARTS: tl.constexpr, ADD: tl.constexpr, DEEP_SHARED: tl.constexpr, DEEP_ROUTED: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x (+ added) + scaled sums over the token's rows of (values + parts) W_up, in fixed
    order. All first loads are under way before any sum, and those of the next turn during one."""
    token, tile = tl.program_id(0), tl.program_id(1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    blocks, weights, pair = block + token * SLOTS, weight + token * SLOTS, S * B + token * SLOTS
    if S:
        shared_tile = _stacked_tile(w_shared, block, 0, column, S, K, M, False, DEEP_SHARED)
    if SLOTS:
        routed_tile = _stacked_tile(w_routed, blocks, 0, column, SLOTS, K, M, True, DEEP_ROUTED)
    wait_for_inputs(PDL)
    if S:
        shared_part = _stacked_values(
            values, parts, stride, weights, 0, token, B, S, K, PARTS, False, DEEP_SHARED
        )
    if SLOTS:
        routed_part = _stacked_values(
            values, parts, stride, weights, 0, pair, 1, SLOTS, K, PARTS, True, DEEP_ROUTED
        )
    total = tl.load(x + token * M + column, mask=column < M, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(added + token * M + column, mask=column < M, other=0.0)
    if S:
        for first in range(DEEP_SHARED, S * K + DEEP_SHARED, DEEP_SHARED):
            next_tile = _stacked_tile(w_shared, block, first, column, S, K, M, False, DEEP_SHARED)
            next_part = _stacked_values(
                values, parts, stride, weights, first, token, B, S, K, PARTS, False, DEEP_SHARED
            )
            total += scale_shared * product(shared_tile, shared_part)
            shared_tile, shared_part = next_tile, next_part
    if SLOTS:
        for first in range(DEEP_ROUTED, SLOTS * K + DEEP_ROUTED, DEEP_ROUTED):
            next_tile = _stacked_tile(
                w_routed, blocks, first, column, SLOTS, K, M, True, DEEP_ROUTED
            )
            next_part = _stacked_values(
                values, parts, stride, weights, first, pair, 1, SLOTS, K, PARTS, True, DEEP_ROUTED
            )
            total += scale_routed * product(routed_tile, routed_part)
            routed_tile, routed_part = next_tile, next_part
    tl.store(y + token * M + column, total.to(y.dtype.element_ty), mask=column < M)


@triton.jit
def logits(
    x, norm, norm_bias, w, y, eps,
    B: tl.constexpr, K: tl.constexpr, M: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    DEEP: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, or norm(x), times the rows of the embedding [M, K]; a program's rows serve all tokens."""
    line, k = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, DEEP)
    inside = k < K
    mask = (line < M)[:, None] & inside[None, :]
    w_tile = tl.load(w + line.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0)
    wait_for_inputs(PDL)
    for token in range(B):
        row = tl.load(x + token * K + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            row = normed(row, inside, k, norm, norm_bias, eps, K, LAYER)
        result = tl.sum(w_tile.to(tl.float32) * row[None, :], 1).to(y.dtype.element_ty)
        tl.store(y + token * M + line, result, mask=line < M)
