"""Cross-entropy of a linear head without its logits in memory.

Shape suffixes: N rows, D width, V vocabulary, R rows at a time, W vocabulary as it is multiplied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops.tracing import has_kernels

# Elements, 128 MiB of fp32 or 1 GiB of bf16. Every piece after the first adds to the weight's
# gradient in fp32, 12 bytes a weight, so on CUDA pieces should be few.
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 29}
COLUMNS = 64  # bf16 products of an odd width take slow kernels; GPT-2's 50,257 is odd


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """-log softmax(hidden weight^T)[target] of each row, [N], fp32 (fp64 for fp64 inputs), nats.

    Works through pieces of rows, so at most `LOGITS_AT_ONCE` logits exist. Inside autocast the
    products take its dtype; logits are reduced in fp32. Targets must lie in 0..V-1. No gradients:
    training takes `weighted_cross_entropy`.
    """
    dtype = _dtype_of_products(hidden_ND, weight_VD)
    with torch.no_grad():
        return _losses(hidden_ND, weight_VD, targets_N, dtype, None)[0]


def weighted_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, share_N: Tensor
) -> Tensor:
    """The sum of the rows' losses, each times its share [N] (fp32, a constant), 0-dim.

    Because the shares are known, a piece's logits turn into its gradient as soon as they are
    there, and nothing is computed twice: three products in all. Gradients of hidden and weight.
    """
    dtype = _dtype_of_products(hidden_ND, weight_VD)
    return _WeightedCrossEntropy.apply(hidden_ND, weight_VD, targets_N, share_N, dtype)


def linear_cross_entropy_reference(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor
) -> Tensor:
    """All logits at once."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD), targets_N, reduction="none")


def _dtype_of_products(hidden_ND: Tensor, weight_VD: Tensor) -> torch.dtype:
    kind = hidden_ND.device.type
    dtype = torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return dtype


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, share_N, dtype):
        nll_N, grad_hidden_ND, grad_weight_VD = _losses(
            hidden_ND, weight_VD, targets_N, dtype, share_N
        )
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype
        return (nll_N * share_N.to(nll_N.dtype)).sum()  # a product would be autocast

    @staticmethod
    def backward(ctx, grad):
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((held * grad).to(dtype) for held, dtype in grads), None, None, None


def _losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    dtype: torch.dtype,
    share_N: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss of each row and, where there are shares, the gradients of hidden and weight."""
    fused = has_kernels(hidden_ND) and dtype != torch.float64
    rows, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    wide = torch.promote_types(dtype, torch.float32)
    nll_N = hidden_ND.new_empty(rows, dtype=wide)
    grad_hidden_ND = grad_weight_WD = None
    with torch.autocast(hidden_ND.device.type, enabled=False):
        hidden_ND = hidden_ND.to(dtype)
        cast_WD = weight_VD.to(dtype)
        if fused and vocabulary % COLUMNS:
            cast_WD = F.pad(cast_WD, (0, 0, 0, -vocabulary % COLUMNS))
        if share_N is not None:
            grad_hidden_ND = torch.empty_like(hidden_ND)
        at_once = LOGITS_AT_ONCE[hidden_ND.device.type] // vocabulary
        for piece in _pieces(rows, at_once):
            logits_RW = hidden_ND[piece] @ cast_WD.t()
            share_R = None if share_N is None else share_N[piece]
            turn = _turn_fused if fused else _turn
            nll_N[piece], grad_RW = turn(logits_RW, targets_N[piece], share_R, vocabulary)
            if share_N is not None:
                torch.mm(grad_RW, cast_WD, out=grad_hidden_ND[piece])
                part_WD = _in_wide(grad_RW.t(), hidden_ND[piece])
                grad_weight_WD = part_WD if grad_weight_WD is None else grad_weight_WD.add_(part_WD)
    if share_N is None:
        return nll_N, None, None
    if grad_weight_WD is None:  # no rows
        grad_weight_WD = torch.zeros_like(cast_WD, dtype=wide)
    return nll_N, grad_hidden_ND, grad_weight_WD[:vocabulary]


def _in_wide(a_WR: Tensor, b_RD: Tensor) -> Tensor:
    """The product in fp32 at least; on CUDA its sums are never rounded to less."""
    if a_WR.is_cuda and a_WR.dtype.itemsize == 2:
        return torch.mm(a_WR, b_RD, out_dtype=torch.float32)
    return (a_WR @ b_RD).to(torch.promote_types(a_WR.dtype, torch.float32))


def _pieces(rows: int, at_most: int) -> list[slice]:
    """Rows in equal pieces, but for the last, of at most so many (at least one)."""
    count = max(1, -(-rows // max(1, at_most)))
    size = max(1, -(-rows // count))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _turn(
    logits_RV: Tensor, targets_R: Tensor, share_R: Tensor | None, vocabulary: int
) -> tuple[Tensor, Tensor | None]:
    """Losses of the rows, and the gradient of their shares of the loss."""
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    log_sum_R = wide_RV.logsumexp(-1)
    nll_R = log_sum_R - wide_RV.gather(1, targets_R[:, None])[:, 0]
    if share_R is None:
        return nll_R, None
    grad_RV = wide_RV.sub_(log_sum_R[:, None]).exp_()
    grad_RV.scatter_add_(1, targets_R[:, None], grad_RV.new_full((len(nll_R), 1), -1))
    return nll_R, grad_RV.mul_(share_R[:, None]).to(logits_RV.dtype)


def _turn_fused(
    logits_RW: Tensor, targets_R: Tensor, share_R: Tensor | None, vocabulary: int
) -> tuple[Tensor, Tensor | None]:
    from mol.ops.kernels.softmax import losses_in_place

    return losses_in_place(logits_RW, targets_R, share_R, vocabulary), logits_RW
