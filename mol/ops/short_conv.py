"""Causal depthwise convolution of packed segments, one filter bank a block.

Shape suffixes: N packed rows, C channels, E blocks, J taps (the last tap meets the row itself).
"""

import torch
from torch import Tensor

from mol.ops.dispatch import RoutePlan, segment_sum


def short_conv(x_NC: Tensor, filters_ECJ: Tensor, plan: RoutePlan) -> Tensor:
    """y_i = sum_j w_j x_{i - (J - 1) + j} inside each segment, w of the row's own block."""
    return _ShortConv.apply(x_NC, filters_ECJ, plan.block_N, plan.within_N)


def _earlier(x_NC: Tensor, by: int, within_N: Tensor) -> Tensor:
    """Row i holds row i - by of the same segment, zero where the segment starts later."""
    if by == 0:
        return x_NC
    shifted = torch.nn.functional.pad(x_NC, (0, 0, by, 0))[: x_NC.shape[0]]
    return shifted.masked_fill((within_N < by)[:, None], 0)


class _ShortConv(torch.autograd.Function):
    """Saves x alone: through autograd the filters of every row, N x C x J, would be kept, and
    their gradient would be a scatter."""

    @staticmethod
    def forward(ctx, x_NC, filters_ECJ, block_N, within_N):
        ctx.save_for_backward(x_NC, filters_ECJ, block_N, within_N)
        taps = filters_ECJ.shape[2]
        y_NC = torch.zeros_like(x_NC)
        for tap in range(taps):
            y_NC = y_NC + _rows(filters_ECJ, tap, block_N) * _earlier(
                x_NC, taps - 1 - tap, within_N
            )
        return y_NC

    @staticmethod
    def backward(ctx, grad_NC):
        x_NC, filters_ECJ, block_N, within_N = ctx.saved_tensors
        blocks, _, taps = filters_ECJ.shape
        grad_x_NC, grad_taps = torch.zeros_like(x_NC), []
        for tap in range(taps):
            by = taps - 1 - tap
            at_source = _rows(filters_ECJ, tap, block_N) * grad_NC
            at_source = at_source.masked_fill((within_N < by)[:, None], 0)
            padded = torch.nn.functional.pad(at_source, (0, 0, 0, by))
            grad_x_NC = grad_x_NC + padded[by:]
            grad_taps.append(segment_sum(grad_NC * _earlier(x_NC, by, within_N), block_N, blocks))
        return grad_x_NC, torch.stack(grad_taps, -1), None, None


def _rows(filters_ECJ: Tensor, tap: int, block_N: Tensor) -> Tensor:
    filters_EC = filters_ECJ[..., tap]
    return filters_EC if filters_EC.shape[0] == 1 else filters_EC[block_N]


def short_conv_reference(x_NC: Tensor, filters_ECJ: Tensor, plan: RoutePlan) -> Tensor:
    """One segment at a time through `conv1d`."""
    _, channels, taps = filters_ECJ.shape
    outputs = []
    for segment, x_TC in enumerate(x_NC.split(plan.cu_seqlens.diff().tolist())):
        if not x_TC.shape[0]:  # conv1d refuses an input shorter than the filter
            continue
        filters_C1J = filters_ECJ[segment // plan.batch][:, None]
        padded_CT = torch.nn.functional.pad(x_TC.t(), (taps - 1, 0))
        outputs.append(torch.nn.functional.conv1d(padded_CT, filters_C1J, groups=channels).t())
    return torch.cat(outputs)
