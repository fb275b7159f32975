"""AdamW as in 4.2. Weight decay acts on matrices; the paper does not say on what it acts, and
norms, biases and per-head scalars are left out as is usual."""

import torch
from torch import nn

from mol.plan.spec import OptimSpec


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Stacked per-block vectors ([E, d]) are vectors all the same: the name tells."""
    vector = any(word in name for word in ("norm", "bias", "decay_log", "dt_bias", "temperature"))
    return parameter.ndim >= 2 and not vector


def make_optimizer(model: nn.Module, optim: OptimSpec) -> torch.optim.AdamW:
    """Two parameter groups, decayed first; one fused kernel a step."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[is_decayed(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": optim.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=optim.betas,
        fused=True,
    )
