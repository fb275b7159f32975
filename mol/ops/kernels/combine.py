"""Rows to packed order and back onto the residual: the glue around the blocks (Eq. 2).

Both directions run over tokens, not over packed rows, so a token's row is read (or written) once
for all its k slots. Import this module on a machine with Triton only; the same mathematics in
PyTorch are `RoutePlan.gather`, `RoutePlan.combine` and `SplitStage._compose`.

Shape suffixes: X tokens, k slots a token, N = X k packed rows, D width.
"""

from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.operator import operator


@triton.jit(do_not_specialize=["tokens"])
def _sum(
    y, inverse, weights, base, shared, out, tokens, shared_scale, scale,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of some tokens: base + shared_scale shared + scale sum_j w_j y_j."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = token < tokens
    mask = inside[:, None] & (column < WIDTH)
    at = token[:, None] * WIDTH + column
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        row = tl.load(inverse + pair, mask=inside, other=0)
        part = tl.load(y + row[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + pair, mask=inside, other=0.0)[:, None]
        sums += part
    sums *= scale
    if shared is not None:
        sums += shared_scale * tl.load(shared + at, mask=mask, other=0.0).to(tl.float32)
    if base is not None:
        sums += tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _spread(
    x, y, inverse, weights, rows, grad_weights, grad_shared, tokens, shared_scale, scale,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scale w_j x to each of a token's rows; with y also <scale x, y_j>, the gradient of w_j."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = token < tokens
    mask = inside[:, None] & (column < WIDTH)
    at = token[:, None] * WIDTH + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if grad_shared is not None:
        scaled = (value * shared_scale).to(grad_shared.dtype.element_ty)
        tl.store(grad_shared + at, scaled, mask=mask)
    value *= scale
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        row = tl.load(inverse + pair, mask=inside, other=0)[:, None] * WIDTH + column
        weighted = value
        if weights is not None:
            part = tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_weights + pair, tl.sum(value * part, 1), mask=inside)
            weighted = value * tl.load(weights + pair, mask=inside, other=0.0)[:, None]
        tl.store(rows + row, weighted.to(rows.dtype.element_ty), mask=mask)


def _launch(kernel, tokens: int, width: int, slots: int, *args, whole: bool = False) -> None:
    """One program a token and 2,048 columns, or several narrow tokens. A decode step splits its
    few tokens into 256 columns each, so that its loads leave from more multiprocessors. `whole`:
    all columns in one program, for a sum along them."""
    columns = triton.next_power_of_2(width)
    if not whole:
        columns = min(columns, 2048 if tokens > 128 else 256)
    rows = max(1, 1024 // columns) if tokens > 128 else 1
    kernel[(triton.cdiv(tokens, rows), triton.cdiv(width, columns))](
        *args, WIDTH=width, SLOTS=slots, ROWS=rows, COLUMNS=columns,
        num_warps=min(16, max(1, rows * columns // 512)),
    )  # fmt: skip


@operator("mol::combine")
def combine(
    y_ND: Tensor,
    inverse_N: Tensor,
    weights_Xk: Tensor | None,
    base_XD: Tensor | None,
    shared_XD: Tensor | None,
    shared_scale: float,
    scale: float,
    slots: int,
) -> Tensor:
    """base + shared_scale shared + scale sum_j weights_j y[inverse of (x, j)], [X, D] (Eq. 2).

    Absent operands are skipped. Weights are fp32; sums are fp32 and rounded once, to the widest
    dtype among y, base and shared: an fp32 residual stays fp32 beside bf16 blocks.
    """
    out_XD = _combined(y_ND, inverse_N, weights_Xk, base_XD, shared_XD, shared_scale, scale, slots)
    operands = (y_ND, inverse_N, weights_Xk, base_XD, shared_XD)
    operands = (t if t is None else t.contiguous() for t in operands)
    _launch(_sum, *out_XD.shape, slots, *operands, out_XD, out_XD.shape[0], shared_scale, scale)
    return out_XD


@combine.register_fake
def _combined(
    y_ND: Tensor,
    inverse_N: Tensor,
    weights_Xk: Tensor | None,
    base_XD: Tensor | None,
    shared_XD: Tensor | None,
    shared_scale: float,
    scale: float,
    slots: int,
) -> Tensor:
    terms = [t.dtype for t in (y_ND, base_XD, shared_XD) if t is not None]
    dtype = reduce(torch.promote_types, terms)
    return y_ND.new_empty(inverse_N.shape[0] // slots, y_ND.shape[1], dtype=dtype)


@torch.library.custom_op("mol::combine_backward", mutates_args=())
def _combine_backward(
    grad_XD: Tensor,
    y_ND: Tensor | None,
    inverse_N: Tensor,
    weights_Xk: Tensor | None,
    to_shared: bool,
    shared_scale: float,
    scale: float,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, the weights and shared; the last two empty where there is none."""
    grad_XD = grad_XD.contiguous()
    grads = _backward_like(
        grad_XD, y_ND, inverse_N, weights_Xk, to_shared, shared_scale, scale, slots
    )
    operands = (grad_XD, y_ND, inverse_N, weights_Xk)
    operands = (t if t is None else t.contiguous() for t in operands)
    outputs = (t if t.numel() else None for t in grads)
    _launch(
        _spread, *grad_XD.shape, slots, *operands, *outputs, grad_XD.shape[0], shared_scale, scale,
        whole=weights_Xk is not None,
    )  # fmt: skip
    return grads


@_combine_backward.register_fake
def _backward_like(
    grad_XD: Tensor,
    y_ND: Tensor | None,
    inverse_N: Tensor,
    weights_Xk: Tensor | None,
    to_shared: bool,
    shared_scale: float,
    scale: float,
    slots: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = grad_XD.dtype if y_ND is None else y_ND.dtype
    grad_ND = grad_XD.new_empty(inverse_N.shape[0], grad_XD.shape[1], dtype=dtype)
    none = grad_XD.new_empty(0)
    grad_Xk = none if weights_Xk is None else torch.empty_like(weights_Xk)
    grad_shared = torch.empty_like(grad_XD, dtype=dtype) if to_shared else grad_XD.new_empty(0)
    return grad_ND, grad_Xk, grad_shared


def _save_combine(ctx, inputs, output) -> None:
    y_ND, inverse_N, weights_Xk, _, _, *ctx.constants = inputs
    # Without weights no gradient reads y.
    ctx.save_for_backward(None if weights_Xk is None else y_ND, inverse_N, weights_Xk)


def _grad_combine(ctx, grad_XD):
    _, _, _, to_base, to_shared, *_ = ctx.needs_input_grad
    y_ND, inverse_N, weights_Xk = ctx.saved_tensors
    grad_ND, grad_Xk, grad_shared = _combine_backward(
        grad_XD, y_ND, inverse_N, weights_Xk, to_shared, *ctx.constants
    )
    return (
        grad_ND,
        None,
        None if weights_Xk is None else grad_Xk,
        grad_XD if to_base else None,
        grad_shared if to_shared else None,
        None,
        None,
        None,
    )


combine.register_autograd(_grad_combine, setup_context=_save_combine)


@operator("mol::gather")
def gather(x_XD: Tensor, inverse_N: Tensor, slots: int) -> Tensor:
    """Rows of the tokens in packed order, [N, D]; a token appears `slots` times. The gradient is
    the fp32 sum of a token's rows."""
    rows_ND = _gathered(x_XD, inverse_N, slots)
    operands = (x_XD.contiguous(), None, inverse_N.contiguous(), None, rows_ND, None, None)
    _launch(_spread, *x_XD.shape, slots, *operands, x_XD.shape[0], 1.0, 1.0)
    return rows_ND


@gather.register_fake
def _gathered(x_XD: Tensor, inverse_N: Tensor, slots: int) -> Tensor:
    return x_XD.new_empty(inverse_N.shape[0], x_XD.shape[1])


def _save_gather(ctx, inputs, output) -> None:
    _, inverse_N, ctx.slots = inputs
    ctx.save_for_backward(inverse_N)


def _grad_gather(ctx, grad_ND):
    (inverse_N,) = ctx.saved_tensors
    return combine.recorded(grad_ND, inverse_N, None, None, None, 1.0, 1.0, ctx.slots), None, None


gather.register_autograd(_grad_gather, setup_context=_save_gather)
