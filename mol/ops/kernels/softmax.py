"""Losses of rows of logits, and their gradient written over them: one kernel, two passes.

A row is read, reduced in fp32 and, for a gradient, read again and overwritten; the second read
comes from the cache. 2 bytes a logit from memory, or 4 with a gradient, in bf16. No atomics.

Shape suffixes: R rows, W columns, of which the first V count.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOW = tl.constexpr(-1e30)  # below any logit; infinity minus infinity would be NaN


@triton.jit(do_not_specialize=["vocabulary"])
def _rows(
    logits, targets, share, nll, vocabulary, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * WIDTH
    column = tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    # Read before anything is overwritten.
    target_logit = tl.load(logits + target).to(tl.float32)
    top = tl.full([COLUMNS], LOW, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        at = start + column
        x = tl.load(logits + at, mask=at < vocabulary, other=LOW).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(nll + row, log_sum - target_logit)
    if share is not None:
        part = tl.load(share + row)
        for start in range(0, WIDTH, COLUMNS):
            at = start + column
            x = tl.load(logits + at, mask=at < vocabulary, other=LOW).to(tl.float32)
            grad = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
            grad = (grad * part).to(logits.dtype.element_ty)
            tl.store(logits + at, grad, mask=at < WIDTH)


def losses_in_place(
    logits_RW: Tensor, targets_R: Tensor, share_R: Tensor | None, vocabulary: int
) -> Tensor:
    """-log softmax over the first `vocabulary` columns at the target, [R], fp32. With shares
    (fp32), the logits are overwritten by the gradient of sum(share * loss), zero beyond the
    vocabulary; without, they stay as they are."""
    assert logits_RW.is_contiguous() and targets_R.dtype == torch.int64
    rows, width = logits_RW.shape
    nll_R = torch.empty(rows, dtype=torch.float32, device=logits_RW.device)
    share_R = None if share_R is None else share_R.to(torch.float32).contiguous()
    columns = min(4096, triton.next_power_of_2(width))
    _rows[(rows,)](
        logits_RW, targets_R.contiguous(), share_R, nll_R, vocabulary, WIDTH=width,
        COLUMNS=columns, num_warps=8 if columns >= 2048 else 4,
    )  # fmt: skip
    return nll_R
