"""Cross-entropy of a linear head without its logits in memory.

Shape suffixes: N rows, D width, V vocabulary, R rows at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LOGITS_AT_ONCE = 1 << 25  # elements; 128 MiB of fp32


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """-log softmax(hidden weight^T)[target] of each row, [N], fp32 (fp64 for fp64 inputs), nats.

    Works through chunks of rows, so at most `LOGITS_AT_ONCE` logits exist, and computes them again
    in the backward pass. Inside autocast the products take its dtype; logits are reduced in fp32.
    Targets must lie in 0..V-1: mask padding in the result.
    """
    kind = hidden_ND.device.type
    dtype = torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N, dtype)


def linear_cross_entropy_reference(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor
) -> Tensor:
    """All logits at once."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD), targets_N, reduction="none")


def _row_chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        nll_N = hidden_ND.new_empty(hidden_ND.shape[0], dtype=wide)
        log_sum_N = torch.empty_like(nll_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            cast_VD = weight_VD.to(dtype)
            for rows in _row_chunks(hidden_ND.shape[0], weight_VD.shape[0]):
                logits_RV = (hidden_ND[rows].to(dtype) @ cast_VD.t()).to(wide)
                log_sum_N[rows] = logits_RV.logsumexp(-1)
                target_R1 = logits_RV.gather(1, targets_N[rows, None])
                nll_N[rows] = log_sum_N[rows] - target_R1[:, 0]
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, log_sum_N)
        ctx.dtype = dtype
        return nll_N

    @staticmethod
    def backward(ctx, grad_N):
        hidden_ND, weight_VD, targets_N, log_sum_N = ctx.saved_tensors
        dtype, wide = ctx.dtype, log_sum_N.dtype
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            cast_VD = weight_VD.to(dtype)
            for rows in _row_chunks(hidden_ND.shape[0], weight_VD.shape[0]):
                hidden_RD = hidden_ND[rows].to(dtype)
                grad_RV = (hidden_RD @ cast_VD.t()).to(wide)
                grad_RV.sub_(log_sum_N[rows, None]).exp_()
                one_R1 = grad_RV.new_full((grad_RV.shape[0], 1), -1)
                grad_RV.scatter_add_(1, targets_N[rows, None], one_R1)
                grad_RV = grad_RV.mul_(grad_N[rows, None]).to(dtype)
                grad_hidden_ND[rows] = (grad_RV @ cast_VD).to(hidden_ND.dtype)
                grad_weight_VD += grad_RV.t() @ hidden_RD
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None
