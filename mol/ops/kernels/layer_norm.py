"""LayerNorm or RMSNorm at full width, with the residual addition and the bias before it.

x' = x + a + bias in x's precision, y = norm(x') in the precision in which it is multiplied. Sums
are fp32, no atomics. Bytes an element with fp32 x and bf16 a and y: forward 12 (x, a, x', y),
backward 16 (x', the gradients of x' and y; those of x and a); without an addition 6, and 10
backward. Kernel by kernel the same was 28 and 46: the bias, the sum, the norm and the cast, and
backward the cast, the norm, its weights, the sum of two gradients, the cast and the bias.

Shape suffixes: D width, P programs, K weights that are summed for (1 to 3). Rows: all dimensions
but the last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.operator import operator

ELEMENTS = 1024  # of a tile, 8 a thread: backward keeps three sums beside three operands
# What an H200's 132 multiprocessors hold at once up to 1024 columns, by the registers of sm_90 (64
# a thread forward, 80 backward), and whole turns beyond. A program of the backward pass leaves up
# to three rows of partial sums, so more of them would be more bytes.
FORWARD, BACKWARD = 8 * 132, 6 * 132


@triton.jit
def _normalized(x, inside, eps, WIDTH: tl.constexpr, CENTER: tl.constexpr):
    """The rows without mean (`CENTER`) over their deviation, 0 outside, and 1 / deviation."""
    if CENTER:
        x = tl.where(inside[None, :], x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    return x * inverse, inverse


@triton.jit(do_not_specialize=["n_rows"])
def _forward(
    x, a, bias, weight, shift, summed, normed, n_rows, eps, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    CENTER: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTER:
        offset = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        more = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n_rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
            if BIAS:
                value += more[None, :]
            # Rounded before it is used, as backward finds it.
            rounded = value.to(summed.dtype.element_ty)
            tl.store(summed + at, rounded, mask=mask)
            value = rounded.to(tl.float32)
        value, _ = _normalized(value, inside, eps, WIDTH, CENTER)
        value *= scale[None, :]
        if CENTER:
            value += offset[None, :]
        tl.store(normed + at, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _backward(
    summed, weight, grad_summed, grad_normed, grad_x, grad_a, part, n_rows, eps,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr,
    APART: tl.constexpr, BIAS: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """`KEPT`: x' is used further, so it has a gradient of its own. `APART`: a has another precision
    than x, so its gradient is another tensor."""
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum_shift = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum_bias = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n_rows)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(summed + at, mask=mask, other=0.0).to(tl.float32)
        back = tl.load(grad_normed + at, mask=mask, other=0.0).to(tl.float32)
        if KEPT:
            straight = tl.load(grad_summed + at, mask=mask, other=0.0).to(tl.float32)
        value, inverse = _normalized(value, inside, eps, WIDTH, CENTER)
        sum_weight += back * value
        if CENTER:
            sum_shift += back
        back *= scale[None, :]
        inner = back - value * (tl.sum(back * value, 1) / WIDTH)[:, None]
        if CENTER:
            inner -= (tl.sum(back, 1) / WIDTH)[:, None]
        back = inner * inverse
        if KEPT:
            back += straight
        tl.store(grad_x + at, back.to(grad_x.dtype.element_ty), mask=mask)
        if APART:
            tl.store(grad_a + at, back.to(grad_a.dtype.element_ty), mask=mask)
        if BIAS:
            sum_bias += back
    part += tl.program_id(0) * (1 + CENTER + BIAS) * WIDTH + column
    tl.store(part, tl.sum(sum_weight, 0), mask=inside)
    if CENTER:
        tl.store(part + WIDTH, tl.sum(sum_shift, 0), mask=inside)
    if BIAS:
        tl.store(part + (1 + CENTER) * WIDTH, tl.sum(sum_bias, 0), mask=inside)


def _sizes(x: Tensor, most: int) -> tuple[int, dict[str, int]]:
    """Programs, at `most` so many, and the kernels' constants."""
    width = x.shape[-1]
    wide = triton.next_power_of_2(width)
    rows = max(1, min(128, ELEMENTS // wide))
    tiles = triton.cdiv(x.numel() // width, rows)
    warps = min(16, max(4, wide // 256))
    sizes = {"WIDTH": width, "WIDE": wide, "ROWS": rows, "num_warps": warps}
    return max(1, min(most, tiles)), sizes


def add_layer_norm(
    x: Tensor,
    a: Tensor | None,
    bias: Tensor | None,
    weight_D: Tensor,
    shift_D: Tensor | None,
    dtype: torch.dtype,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(x' = x + a + bias in x's precision, LayerNorm(x') weight + shift in `dtype`), [..., D];
    RMSNorm without a shift. `a` is no wider than x. Without one, x' is x itself, and there is no
    bias, which is otherwise [D] or [1, D]. Gradients of the first five."""
    summed, normed = _add_layer_norm(x, a, bias, weight_D, shift_D, dtype, eps)
    return x if a is None else summed, normed


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


@operator("mol::add_layer_norm")
def _add_layer_norm(
    x: Tensor,
    a: Tensor | None,
    bias: Tensor | None,
    weight_D: Tensor,
    shift_D: Tensor | None,
    dtype: torch.dtype,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(x', y); an operator must not return its input, so x' is empty without an addition."""
    summed, normed = _outputs(x, a, dtype)
    programs, sizes = _sizes(x, FORWARD)
    _forward[(programs,)](
        *_contiguous(x, a, bias, weight_D, shift_D), summed, normed, x.numel() // x.shape[-1], eps,
        ADD=a is not None, BIAS=bias is not None, CENTER=shift_D is not None, **sizes,
    )  # fmt: skip
    return summed, normed


def _outputs(x: Tensor, a: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    summed = x.new_empty(0 if a is None else x.shape)
    return summed, x.new_empty(x.shape, dtype=dtype)


@_add_layer_norm.register_fake
def _(x, a, bias, weight_D, shift_D, dtype, eps):
    return _outputs(x, a, dtype)


@torch.library.custom_op("mol::add_layer_norm_backward", mutates_args=())
def _add_layer_norm_backward(
    summed: Tensor,
    weight_D: Tensor,
    grad_summed: Tensor | None,
    grad_normed: Tensor,
    eps: float,
    a_dtype: torch.dtype,
    biased: bool,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of a (empty if in x's precision: the same) and, [K, D] in fp32, of weight,
    shift and bias, as far as they are there."""
    programs, sizes = _sizes(summed, BACKWARD)
    grad_x, grad_a, sums_KD = _gradients(summed, a_dtype, biased, centered)
    part_PKD = sums_KD.new_empty(programs, *sums_KD.shape)
    _backward[(programs,)](
        *_contiguous(summed, weight_D, grad_summed, grad_normed), grad_x, grad_a, part_PKD,
        summed.numel() // summed.shape[-1], eps, KEPT=grad_summed is not None,
        APART=grad_a.numel() > 0, BIAS=biased, CENTER=centered, **sizes,
    )  # fmt: skip
    add_up(part_PKD[None], sums_KD[None])
    return grad_x, grad_a, sums_KD


def _gradients(
    summed: Tensor, a_dtype: torch.dtype, biased: bool, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    same = a_dtype == summed.dtype
    grad_a = summed.new_empty(0 if same else summed.shape, dtype=a_dtype)
    shape = 1 + centered + biased, summed.shape[-1]
    return summed.new_empty(summed.shape), grad_a, summed.new_empty(shape, dtype=torch.float32)


@_add_layer_norm_backward.register_fake
def _(summed, weight_D, grad_summed, grad_normed, eps, a_dtype, biased, centered):
    return _gradients(summed, a_dtype, biased, centered)


def _save(ctx, inputs, output):
    x, a, bias, weight_D, shift_D, _, ctx.eps = inputs
    ctx.set_materialize_grads(False)  # x' of the last norm has no gradient
    ctx.a_dtype = None if a is None else a.dtype
    ctx.save_for_backward(x if a is None else output[0], bias, weight_D, shift_D)


def _gradient(ctx, grad_summed, grad_normed):
    summed, bias, weight_D, shift_D = ctx.saved_tensors
    if grad_normed is None:  # x' alone was used
        grad_normed = torch.zeros_like(summed)
    added = ctx.a_dtype is not None
    grad_x, grad_a, sums_KD = _add_layer_norm_backward(
        summed, weight_D, grad_summed if added else None, grad_normed, ctx.eps,
        ctx.a_dtype or summed.dtype, bias is not None, shift_D is not None,
    )  # fmt: skip
    sums = iter(sums_KD)
    grad_weight = next(sums).to(weight_D.dtype)
    grad_shift = None if shift_D is None else next(sums).to(shift_D.dtype)
    grad_bias = None if bias is None else next(sums).to(bias.dtype).view(bias.shape)
    if added and ctx.a_dtype == summed.dtype:
        grad_a = grad_x
    return grad_x, grad_a if added else None, grad_bias, grad_weight, grad_shift, None, None


_add_layer_norm.register_autograd(_gradient, setup_context=_save)
