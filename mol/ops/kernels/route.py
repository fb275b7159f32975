"""Choice of each token's blocks in one pass, and its gradient (2.3).

Import this module on a machine with Triton only; the same mathematics in PyTorch are
`SplitStage.route`.

Shape suffixes: X tokens, D width, E blocks, k slots a token, P parts of the tokens, C programs of
the forward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.operator import operator

FEW = 128  # tokens up to which each has a program of its own: one for every multiprocessor
TALL = 8192  # tokens from which tiles of 64 instead of 16 fill the multiprocessors
PARTS, PART_ROWS = 64, 32  # the backward pass: most parts, and tokens at a time in each


@triton.jit
def _product(a, b, sums):
    """a @ b + sums at the accuracy of fp32: products of two 16-bit numbers are exact as they are,
    others are made of three tf32 products (22 bits)."""
    if a.dtype == b.dtype and a.dtype.primitive_bitwidth == 16:
        return tl.dot(a, b, sums)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="tf32x3")


@triton.jit(do_not_specialize=["tokens"])
def _route(
    x, router, probability, weights, chosen, counts, tokens,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, OVER_SELECTED: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Softmax over the blocks and the SLOTS largest, of ROWS tokens or of a single one; and how
    many of them name each block.

    PIECES of CHUNK columns are multiplied side by side, each by warps of its own.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    block = tl.arange(0, PADDED)
    known = block < BLOCKS
    if ROWS == 1:  # sums along a matrix product's shortest side would leave most lanes idle
        sums = tl.zeros([PADDED, CHUNK], dtype=tl.float32)
        for start in range(0, WIDTH, CHUNK):
            column = (start + tl.arange(0, CHUNK))[None, :]
            at = block[:, None] * WIDTH + column
            part = tl.load(x + token[:, None] * WIDTH + column, mask=column < WIDTH, other=0.0)
            rows = tl.load(router + at, mask=known[:, None] & (column < WIDTH), other=0.0)
            sums += rows.to(tl.float32) * part.to(tl.float32)
        scores = tl.sum(sums, 1)[None, :]
    elif PIECES > 1:
        sums = tl.zeros([PIECES, ROWS, PADDED], dtype=tl.float32)
        piece = tl.arange(0, PIECES)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        for start in range(0, WIDTH, PIECES * CHUNK):
            column = start + piece
            within = column < WIDTH
            part = tl.load(
                x + token[None, :, None] * WIDTH + column[:, None, :],
                mask=inside[None, :, None] & within[:, None, :], other=0.0,
            )  # fmt: skip
            columns = tl.load(
                router + block[None, None, :] * WIDTH + column[:, :, None],
                mask=known[None, None, :] & within[:, :, None], other=0.0,
            )  # fmt: skip
            sums = tl.dot(part, columns, sums)
        scores = tl.sum(sums, 0)
    else:
        scores = tl.zeros([ROWS, PADDED], dtype=tl.float32)
        for start in range(0, WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)
            within = column < WIDTH
            part = tl.load(
                x + token[:, None] * WIDTH + column[None, :],
                mask=inside[:, None] & within[None, :], other=0.0,
            )  # fmt: skip
            columns = tl.load(
                router + block[None, :] * WIDTH + column[:, None],
                mask=known[None, :] & within[:, None], other=0.0,
            )  # fmt: skip
            scores = _product(part, columns, scores)
    scores = tl.where(known[None, :], scores, -float("inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(
        probability + token[:, None] * BLOCKS + block[None, :], p,
        mask=inside[:, None] & known[None, :],
    )  # fmt: skip
    # NaN ranks highest, so that any row names distinct, existing blocks.
    left = tl.where(known[None, :], tl.where(p == p, p, 2.0), -1.0)
    rank = tl.full([ROWS, PADDED], SLOTS, dtype=tl.int32)
    for slot in range(SLOTS):
        highest = left == tl.max(left, 1)[:, None]
        best = tl.min(tl.where(highest, block[None, :], PADDED), 1)
        hit = block[None, :] == best[:, None]
        rank = tl.where(hit, slot, rank)
        left = tl.where(hit, -1.0, left)
    taken = rank < SLOTS
    if OVER_SELECTED:
        p = p / tl.sum(tl.where(taken, p, 0.0), 1)[:, None]
    at = token[:, None] * SLOTS + rank
    tl.store(weights + at, p, mask=inside[:, None] & taken)
    named = tl.broadcast_to(block[None, :], [ROWS, PADDED]).to(tl.int64)
    tl.store(chosen + at, named, mask=inside[:, None] & taken)
    found = tl.sum((inside[:, None] & taken).to(tl.int32), 0)
    tl.store(counts + block * tl.num_programs(0) + tl.program_id(0), found, mask=known)


@triton.jit(do_not_specialize=["tokens"])
def _route_backward(
    x, router, probability, chosen, grad_probability, grad_weights, grad_x, grad_router, tokens,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, OVER_SELECTED: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Of CHUNK columns: the gradient of every P-th tile of x, and their share of the router's.

    Scores are held by blocks, [PADDED, ROWS], so that no tall operand is transposed in registers:
    Triton 3.4 to 3.7 computes such products wrongly on Hopper.
    """
    part = tl.program_id(0)
    block = tl.arange(0, PADDED)[:, None]
    known = block < BLOCKS
    column = (tl.program_id(1) * CHUNK + tl.arange(0, CHUNK))[None, :]
    within = column < WIDTH
    at_router = block * WIDTH + column
    router_EC = tl.load(router + at_router, mask=known & within, other=0.0)
    sums = tl.zeros([PADDED, CHUNK], dtype=tl.float32)
    for start in range(part * ROWS, tokens, tl.num_programs(0) * ROWS):
        token = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = token < tokens
        at = token[None, :] * BLOCKS + block
        mask = inside[None, :] & known
        p = tl.load(probability + at, mask=mask, other=0.0)
        grad = tl.load(grad_probability + at, mask=mask, other=0.0)
        to_chosen = tl.zeros([PADDED, ROWS], dtype=tl.float32)
        taken = tl.zeros([PADDED, ROWS], dtype=tl.int1)
        for slot in range(SLOTS):
            pair = token * SLOTS + slot
            named = tl.load(chosen + pair, mask=inside, other=-1).to(tl.int32)
            hit = block == named[None, :]
            taken = taken | hit
            to_weight = tl.load(grad_weights + pair, mask=inside, other=0.0)
            to_chosen += tl.where(hit, to_weight[None, :], 0.0)
        if OVER_SELECTED:  # w = p / s, s the sum over the chosen
            s = tl.sum(tl.where(taken, p, 0.0), 0)
            s = tl.where(inside, s, 1.0)[None, :]
            shift = tl.sum(to_chosen * p, 0)[None, :] / s
            to_chosen = tl.where(taken, (to_chosen - shift) / s, 0.0)
        grad += to_chosen
        grad = p * (grad - tl.sum(grad * p, 0)[None, :])
        at_x = token[:, None] * WIDTH + column
        mask_x = inside[:, None] & within
        x_RC = tl.load(x + at_x, mask=mask_x, other=0.0)
        sums = _product(grad, x_RC, sums)
        grad_RC = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
        grad_RC = _product(tl.trans(grad), router_EC, grad_RC)
        tl.store(grad_x + at_x, grad_RC.to(grad_x.dtype.element_ty), mask=mask_x)
    at_part = part.to(tl.int64) * BLOCKS * WIDTH + at_router
    tl.store(grad_router + at_part, sums, mask=known & within)


@operator("mol::route")
def route(
    x_XD: Tensor, router_ED: Tensor, k: int, over_selected: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(P [X, E], weights [X, k], chosen [X, k]) of softmax(router x) and its k largest (2.3), and
    the rows of each block among every `tile_rows` tokens [E, C], for `mol.ops.kernels.plan`.

    P and weights fp32, `chosen` int64, largest first, equal ones by lower number; counts int32. The
    weights are P of the chosen, divided by their sum if `over_selected`. x and router are bf16,
    fp16 or fp32; scores have the accuracy of fp32 in either case. Differentiable in P and weights.
    """
    tokens, width = x_XD.shape
    n_blocks = router_ED.shape[0]
    outputs = _routed(x_XD, router_ED, k, over_selected)
    padded = max(16, triton.next_power_of_2(n_blocks))
    exact = x_XD.dtype == router_ED.dtype != torch.float32  # one product instead of three
    rows = tile_rows(tokens)
    chunk, pieces, warps, stages = _tiles(rows, padded, exact)
    chunk = _chunk(width, chunk)
    _route[(outputs[3].shape[1],)](
        x_XD.contiguous(), router_ED.contiguous(), *outputs, tokens,
        WIDTH=width, BLOCKS=n_blocks, SLOTS=k, OVER_SELECTED=over_selected, ROWS=rows, CHUNK=chunk,
        PIECES=min(pieces, triton.next_power_of_2(triton.cdiv(width, chunk))), PADDED=padded,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return outputs


def tile_rows(tokens: int) -> int:
    """Tokens of one program, all of them if they are fewer; a power of two."""
    return 1 if tokens <= FEW else 16 if tokens < TALL else 64


def _tiles(rows: int, padded: int, exact: bool) -> tuple[int, int, int, int]:
    """Columns at a time, pieces of them side by side, warps, stages."""
    if rows == 1:
        return 16384 // padded, 1, 8, 3
    if rows == 16 and exact and padded <= 16:  # the fastest of nine on an H200, width 2048
        return 128, 4, 4, 3
    if rows == 16:  # few programs: each keeps more loads in flight
        return 256 if exact else 64, 1, 4, 5
    return 128 if exact else 64, 1, 4, 3  # tall tiles read the router less often


def _chunk(width: int, most: int) -> int:
    """Columns at a time: a matrix product takes 16 at least."""
    return min(most, max(16, triton.next_power_of_2(width)))


@route.register_fake
def _routed(
    x_XD: Tensor, router_ED: Tensor, k: int, over_selected: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, n_blocks = x_XD.shape[0], router_ED.shape[0]
    programs = triton.cdiv(tokens, tile_rows(tokens))
    return (
        x_XD.new_empty(tokens, n_blocks, dtype=torch.float32),
        x_XD.new_empty(tokens, k, dtype=torch.float32),
        x_XD.new_empty(tokens, k, dtype=torch.int64),
        x_XD.new_empty(n_blocks, programs, dtype=torch.int32),
    )


@torch.library.custom_op("mol::route_backward", mutates_args=())
def _backward(
    x_XD: Tensor,
    router_ED: Tensor,
    probability_XE: Tensor,
    chosen_Xk: Tensor,
    grad_probability_XE: Tensor,
    grad_weights_Xk: Tensor,
    over_selected: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the router."""
    tokens, width = x_XD.shape
    n_blocks = router_ED.shape[0]
    parts = min(PARTS, -(-tokens // PART_ROWS))
    grad_x, grad_router = x_XD.new_empty(x_XD.shape), router_ED.new_empty(router_ED.shape)
    part_PED = x_XD.new_empty(parts, n_blocks, width, dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(n_blocks))
    chunk = _chunk(width, 128 if padded <= 32 else 64)
    _route_backward[(parts, triton.cdiv(width, chunk))](
        x_XD.contiguous(), router_ED.contiguous(), probability_XE, chosen_Xk,
        grad_probability_XE.contiguous(), grad_weights_Xk.contiguous(), grad_x, part_PED, tokens,
        WIDTH=width, BLOCKS=n_blocks, SLOTS=chosen_Xk.shape[1], OVER_SELECTED=over_selected,
        ROWS=PART_ROWS, CHUNK=chunk, PADDED=padded, num_warps=4,
    )  # fmt: skip
    add_up(part_PED[None], grad_router[None])
    return grad_x, grad_router


@_backward.register_fake
def _(
    x_XD: Tensor,
    router_ED: Tensor,
    probability_XE: Tensor,
    chosen_Xk: Tensor,
    grad_probability_XE: Tensor,
    grad_weights_Xk: Tensor,
    over_selected: bool,
) -> tuple[Tensor, Tensor]:
    return x_XD.new_empty(x_XD.shape), router_ED.new_empty(router_ED.shape)


def _save(ctx, inputs, output) -> None:
    x_XD, router_ED, _, ctx.over_selected = inputs
    probability_XE, _, chosen_Xk, _ = output
    ctx.save_for_backward(x_XD, router_ED, probability_XE, chosen_Xk)


def _grad(ctx, grad_probability_XE, grad_weights_Xk, *_):
    x_XD, router_ED, *outputs = ctx.saved_tensors
    grads = _backward(
        x_XD, router_ED, *outputs, grad_probability_XE, grad_weights_Xk, ctx.over_selected
    )
    return *grads, None, None


route.register_autograd(_grad, setup_context=_save)
