"""Which packed row each token's slot is, by counting (2.3).

Import this module on a machine with Triton only; the same in PyTorch is `RoutePlan.routed`.

Shape suffixes: B sequences, T positions, X = B T tokens, E blocks, k slots a token, N = X k packed
rows, C runs of tokens, of equal length but for the last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.operator import operator
from mol.ops.kernels.route import tile_rows

TILE = 512  # tokens times blocks that a program holds at a time
STEP = 2048  # the same in a step of many sequences: a single program saves a launch
PLANNERS = 512  # most programs that count one sequence: each reads the counts of all runs


@triton.jit
def _one_hot(chosen, token, inside, SLOTS: tl.constexpr, PADDED: tl.constexpr):
    """1 where a token (rows) names a block (columns)."""
    block = tl.arange(0, PADDED)[None, :]
    hot = (token[:, None] + block) * 0
    for slot in range(SLOTS):
        named = tl.load(chosen + token * SLOTS + slot, mask=inside, other=-1).to(tl.int32)
        hot += (named[:, None] == block).to(tl.int32)
    return hot


@triton.jit(do_not_specialize=["length", "tiles", "steps"])
def _count(
    chosen, counts, length, tiles, steps,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rows of each block among `steps` times TOKENS tokens of one sequence."""
    mine = tl.program_id(0)
    block = tl.arange(0, PADDED)
    found = block * 0
    for step in range(steps):
        time = (mine % tiles * steps + step) * TOKENS + tl.arange(0, TOKENS)
        token = mine // tiles * length + time
        found += tl.sum(_one_hot(chosen, token, time < length, SLOTS, PADDED), 0)
    tl.store(counts + block * tl.num_programs(0) + mine, found, mask=block < BLOCKS)


@triton.jit(do_not_specialize=["length", "tiles", "steps", "runs", "of_sequence", "of_program"])
def _place(
    chosen, counts, order, inverse, blocks, withins, times, segments, offs, edges,
    length, tiles, steps, runs, of_sequence, of_program, ALONE: tl.constexpr, SINGLE: tl.constexpr,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The packed rows of `steps` times TOKENS tokens of one sequence.

    `counts` are those of `runs` runs of tokens, `of_sequence` in each sequence and `of_program` in
    each program before the sequence's last. ALONE: this program has all the tokens, and there are
    no counts. SINGLE: the tokens are one sequence each, walked as if they were one sequence.
    """
    mine, programs = tl.program_id(0), tl.num_programs(0)
    sequence = mine // tiles
    block = tl.arange(0, PADDED)
    known = block < BLOCKS
    before = block * 0  # of this block: rows of earlier programs
    opened = block * 0  # rows of earlier sequences
    total = block * 0
    if ALONE:
        token = tl.arange(0, TOKENS)
        total += tl.sum(_one_hot(chosen, token, token < length, SLOTS, PADDED), 0)
    else:
        first_run = sequence * of_sequence
        for start in range(0, runs, WIDE):
            run = start + tl.arange(0, WIDE)[None, :]
            mask = known[:, None] & (run < runs)
            held = tl.load(counts + block[:, None] * runs + run, mask=mask, other=0)
            total += tl.sum(held, 1)
            before += tl.sum(tl.where(run < first_run + mine % tiles * of_program, held, 0), 1)
            opened += tl.sum(tl.where(run < first_run, held, 0), 1)
    ends = tl.cumsum(total, 0)
    first = ends - total + opened  # where the segments begin
    before -= opened
    batch = programs // tiles
    if SINGLE:
        batch = length
    elif mine % tiles == 0:
        tl.store(edges + block * batch + sequence, first, mask=known)
    for step in range(steps):
        time = (mine % tiles * steps + step) * TOKENS + tl.arange(0, TOKENS)
        inside = time < length
        token = sequence * length + time
        hot = _one_hot(chosen, token, inside, SLOTS, PADDED)
        rank = tl.cumsum(hot, 0) - hot + before[None, :]
        before += tl.sum(hot, 0)
        owner = token * 0 + sequence
        if SINGLE:
            at = block[None, :] * batch + token[:, None]
            tl.store(edges + at, first[None, :] + rank, mask=inside[:, None] & known[None, :])
            owner, time = token, time * 0
        for slot in range(SLOTS):
            pair = token * SLOTS + slot
            named = tl.load(chosen + pair, mask=inside, other=-1).to(tl.int32)
            hit = named[:, None] == block[None, :]
            within = tl.sum(tl.where(hit, rank, 0), 1)
            row = within + tl.sum(tl.where(hit, first[None, :], 0), 1)
            if SINGLE:
                within *= 0
            tl.store(order + row, pair.to(tl.int64), mask=inside)
            tl.store(inverse + pair, row.to(tl.int64), mask=inside)
            tl.store(blocks + row, named.to(tl.int64), mask=inside)
            tl.store(withins + row, within.to(tl.int64), mask=inside)
            tl.store(times + row, time.to(tl.int64), mask=inside)
            tl.store(segments + row, (named * batch + owner).to(tl.int64), mask=inside)
    if mine == 0:
        tl.store(offs + block, ends, mask=known)
        tl.store(edges + BLOCKS * batch, tl.sum(total, 0))


@operator("mol::plan")
def plan(
    chosen_Xk: Tensor, batch: int, length: int, n_blocks: int, counts_EC: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(order_N, inverse_N, block_N, within_N, time_N, segment_N, offs_E, cu_seqlens) of
    `RoutePlan.routed`, number for number, without sorting.

    A token names a block at most once, so its place among the block's rows is the number of
    earlier tokens that name the block: one launch to count and one to place. The first is left
    out where 256 tokens are all there are, of one sequence or one step of many, and where `route`
    has counted (`counts_EC`) in runs that end with the sequences. N must be below 2^31.
    """
    outputs = _planned(chosen_Xk, batch, length, n_blocks)
    padded = triton.next_power_of_2(n_blocks)
    single = length == 1
    if single:
        batch, length = 1, batch
    held = STEP if single else TILE
    tokens = min(max(32, min(256, held // padded)), triton.next_power_of_2(length))
    run = tile_rows(chosen_Xk.shape[0])
    counted = counts_EC is not None and counts_EC.shape[1] <= PLANNERS
    counted = counted and (batch == 1 or length % run == 0)
    if counted:
        tokens = max(tokens, run)
    steps = 1
    while steps * tokens * PLANNERS < length:
        steps *= 2
    tiles = triton.cdiv(length, steps * tokens)
    programs = batch * tiles
    sizes = dict(BLOCKS=n_blocks, SLOTS=chosen_Xk.shape[1], TOKENS=tokens, PADDED=padded)
    chosen_Xk = chosen_Xk.contiguous()
    if counted:
        runs = counts_EC.shape[1], triton.cdiv(length, run), steps * tokens // run
    else:
        runs = programs, tiles, 1
        counts_EC = chosen_Xk.new_empty(n_blocks, programs, dtype=torch.int32)
        if programs > 1:
            _count[(programs,)](chosen_Xk, counts_EC, length, tiles, steps, **sizes, num_warps=4)
    wide = min(triton.next_power_of_2(runs[0]), max(32, 2048 // padded))
    _place[(programs,)](
        chosen_Xk, counts_EC, *outputs, length, tiles, steps, *runs,
        ALONE=programs == 1, SINGLE=single, WIDE=wide, **sizes, num_warps=4,
    )  # fmt: skip
    return outputs


@plan.register_fake
def _planned(
    chosen_Xk: Tensor, batch: int, length: int, n_blocks: int, counts_EC: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    n_rows = chosen_Xk.numel()
    of_rows = tuple(chosen_Xk.new_empty(n_rows) for _ in range(6))
    sizes = (n_blocks, n_blocks * batch + 1)
    offs_E, cu_seqlens = (chosen_Xk.new_empty(n, dtype=torch.int32) for n in sizes)
    return *of_rows, offs_E, cu_seqlens
