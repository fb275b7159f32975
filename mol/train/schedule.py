"""Learning rate by step: linear warm-up, then cosine to `min_lr_ratio` of the peak (4.2)."""

import math

from mol.plan.spec import OptimSpec


def lr_at(step: int, optim: OptimSpec) -> float:
    """Learning rate of step `step`, counted from 0. The last step is the cosine's last point
    above its floor; a warm-up of w steps reaches the peak at step w - 1."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / (optim.steps - optim.warmup_steps)
    floor = optim.lr * optim.min_lr_ratio
    return floor + 0.5 * (optim.lr - floor) * (1 + math.cos(math.pi * progress))
