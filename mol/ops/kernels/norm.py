"""RMSNorm of packed rows, with the bias and the residual addition before it (Eq. 1).

Sums are fp32, no atomics. Bytes a row in bf16: `norm` 4 M, `add_norm` 6 M, with a bias 8 M (the
biased rows are written, too); backward 6 M, 8 M and 10 M.

Shape suffixes: N packed rows, E blocks (1 for a full-width layer), M width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.add_up import add_up
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import block_share, count_parts

ELEMENTS = 2048  # of a tile, 16 a thread


@triton.jit(do_not_specialize=["parts"])
def _forward(
    h, a, bias, weight, offs, attended, normed, parts, eps, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // parts
    first, last = block_share(offs, block, tl.program_id(0) % parts, parts, ROWS)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    at_block = block * WIDTH + column
    scale = tl.load(weight + at_block, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + at_block, mask=inside, other=0.0).to(tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        x = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            more = tl.load(a + at, mask=mask, other=0.0)
            if BIAS:
                # Rounded before it is used, as backward finds it.
                more = (more.to(tl.float32) + shift[None, :]).to(attended.dtype.element_ty)
                tl.store(attended + at, more, mask=mask)
            x += more.to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        tl.store(normed + at, (x * scale[None, :]).to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def _backward(
    h, attended, weight, offs, grad_attended, grad_normed, grad_h, grad_a, part_bias, part_weight,
    parts, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Without a bias h and a share one gradient, `grad_h`, and `attended` is a itself."""
    share = tl.program_id(0).to(tl.int64)
    block = share // parts
    first, last = block_share(offs, block, (share % parts).to(tl.int32), parts, ROWS)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    scale = tl.load(weight + block * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    sum_bias = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < last)[:, None] & inside[None, :]
        at = row[:, None] * WIDTH + column[None, :]
        x = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(attended + at, mask=mask, other=0.0).to(tl.float32)
        back = tl.load(grad_normed + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x *= inverse
        sum_weight += back * x
        back *= scale[None, :]
        back = (back - x * (tl.sum(back * x, 1) / WIDTH)[:, None]) * inverse
        tl.store(grad_h + at, back.to(grad_h.dtype.element_ty), mask=mask)
        if BIAS:
            back += tl.load(grad_attended + at, mask=mask, other=0.0).to(tl.float32)
            sum_bias += back
            tl.store(grad_a + at, back.to(grad_a.dtype.element_ty), mask=mask)
    slot = share * WIDTH + column
    tl.store(part_weight + slot, tl.sum(sum_weight, 0), mask=inside)
    if BIAS:
        tl.store(part_bias + slot, tl.sum(sum_bias, 0), mask=inside)


def _sizes(h_NM: Tensor, n_blocks: int) -> tuple[int, dict[str, int]]:
    """Parts a block, and the kernels' constants."""
    n_rows, width = h_NM.shape
    wide = triton.next_power_of_2(width)
    rows = max(1, min(128, ELEMENTS // wide))
    sizes = {"WIDTH": width, "WIDE": wide, "ROWS": rows, "num_warps": 4 if wide <= 2048 else 8}
    return count_parts(n_rows, n_blocks, rows), sizes


def norm(h_NM: Tensor, weight_EM: Tensor, offs_E: Tensor, eps: float = 1e-5) -> Tensor:
    """RMSNorm(h) times the weight of the row's block, [N, M] in h's precision. `offs_E` (int32)
    is the last row + 1 of each block. Gradients of h and weight."""
    return _add_norm(h_NM, None, None, weight_EM, offs_E, eps)[1]


def add_norm(
    h_NM: Tensor,
    a_NM: Tensor,
    bias_EM: Tensor | None,
    weight_EM: Tensor,
    offs_E: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(attended, normed) [N, M]: a + bias of the row's block (`a` itself without a bias), and
    RMSNorm(h + attended) times the block's weight. Gradients of the first four."""
    attended_NM, normed_NM = _add_norm(h_NM, a_NM, bias_EM, weight_EM, offs_E, eps)
    return a_NM if bias_EM is None else attended_NM, normed_NM


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


@operator("mol::add_norm")
def _add_norm(
    h_NM: Tensor,
    a_NM: Tensor | None,
    bias_EM: Tensor | None,
    weight_EM: Tensor,
    offs_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(attended, normed); an operator must not return its input, so attended is empty without a
    bias."""
    attended_NM, normed_NM = _outputs(h_NM, bias_EM)
    n_blocks = weight_EM.shape[0]
    parts, sizes = _sizes(h_NM, n_blocks)
    _forward[(n_blocks * parts,)](
        h_NM.contiguous(), _contiguous(a_NM), _contiguous(bias_EM), weight_EM.contiguous(), offs_E,
        attended_NM, normed_NM, parts, eps, ADD=a_NM is not None, BIAS=bias_EM is not None, **sizes,
    )  # fmt: skip
    return attended_NM, normed_NM


def _outputs(h_NM: Tensor, bias_EM: Tensor | None) -> tuple[Tensor, Tensor]:
    return h_NM.new_empty(0 if bias_EM is None else h_NM.shape), h_NM.new_empty(h_NM.shape)


@_add_norm.register_fake
def _(h_NM, a_NM, bias_EM, weight_EM, offs_E, eps):
    return _outputs(h_NM, bias_EM)


@torch.library.custom_op("mol::add_norm_backward", mutates_args=())
def _add_norm_backward(
    h_NM: Tensor,
    attended_NM: Tensor | None,
    bias_EM: Tensor | None,
    weight_EM: Tensor,
    offs_E: Tensor,
    eps: float,
    grad_attended_NM: Tensor,
    grad_NM: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, a, bias and weight; a's and the bias's are empty without a bias."""
    grad_h, grad_a, grad_bias, grad_weight = _gradients(h_NM, bias_EM, weight_EM)
    n_blocks, width = weight_EM.shape
    parts, sizes = _sizes(h_NM, n_blocks)
    part_weight = h_NM.new_empty(n_blocks, parts, width, dtype=torch.float32)
    part_bias = torch.empty_like(part_weight) if bias_EM is not None else None
    _backward[(n_blocks * parts,)](
        h_NM.contiguous(), _contiguous(attended_NM), weight_EM.contiguous(), offs_E,
        grad_attended_NM.contiguous(), grad_NM.contiguous(), grad_h, grad_a, part_bias,
        part_weight, parts, eps, ADD=attended_NM is not None, BIAS=bias_EM is not None, **sizes,
    )  # fmt: skip
    if bias_EM is not None:
        add_up(part_bias, grad_bias)
    return grad_h, grad_a, grad_bias, add_up(part_weight, grad_weight)


def _gradients(h_NM: Tensor, bias_EM: Tensor | None, weight_EM: Tensor) -> tuple[Tensor, ...]:
    grad_h, grad_weight = h_NM.new_empty(h_NM.shape), weight_EM.new_empty(weight_EM.shape)
    if bias_EM is None:
        return grad_h, h_NM.new_empty(0), weight_EM.new_empty(0), grad_weight
    return grad_h, h_NM.new_empty(h_NM.shape), bias_EM.new_empty(bias_EM.shape), grad_weight


@_add_norm_backward.register_fake
def _(h_NM, attended_NM, bias_EM, weight_EM, offs_E, eps, grad_attended_NM, grad_NM):
    return _gradients(h_NM, bias_EM, weight_EM)


def _save(ctx, inputs, output):
    h_NM, a_NM, bias_EM, weight_EM, offs_E, ctx.eps = inputs
    attended_NM = a_NM if bias_EM is None else output[0]
    ctx.save_for_backward(h_NM, attended_NM, bias_EM, weight_EM, offs_E)


def _gradient(ctx, *grads):
    saved = ctx.saved_tensors  # once: recomputed layers give them out once
    _, attended_NM, bias_EM, _, _ = saved
    grad_h, grad_a, grad_bias, grad_weight = _add_norm_backward(*saved, ctx.eps, *grads)
    if bias_EM is None:
        grad_a = None if attended_NM is None else grad_h
        grad_bias = None
    return grad_h, grad_a, grad_bias, grad_weight, None, None


_add_norm.register_autograd(_gradient, setup_context=_save)
