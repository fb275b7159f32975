"""Tells on the device whether training went wrong, and keeps the step that did from the weights.

A step fails when its loss or gradient norm is not finite, or when the running mean of the loss
(a new loss weighs a tenth) comes to lie more than `SPIKE` nats above its lowest value: one step of
10 nats too many, or a few of 3. A lone step of 5, as small models at high learning rates have them
and recover from, passes; in one that does not recover the mean gets there within a few steps.
"""

import torch
from torch import Tensor

SPIKE = 1.0
WEIGHT = 0.1  # of a new loss in the running mean


class Guard:
    """Running mean of the loss, its lowest value, steps seen, and whether one failed.

    failed = guard.judge(loss, norm)   # 0-dim, 1.0 from the first failed step on
    guard.check()                      # waits for the device
    """

    def __init__(self, device: torch.device):
        self.mean = torch.zeros((), device=device)
        self.lowest = torch.full((), torch.inf, device=device)
        self.seen = torch.zeros((), device=device, dtype=torch.int64)
        self.failed = torch.zeros((), device=device)
        self.last_2 = torch.zeros(2, device=device)  # loss and norm, those of the failed step

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Takes a step's loss and gradient norm into account; `failed` as it then is."""
        loss, norm = loss.float(), norm.float()
        mean = torch.where(self.seen == 0, loss, torch.lerp(self.mean, loss, WEIGHT))
        before = self.failed == 0
        good = before & loss.isfinite() & norm.isfinite() & (mean <= self.lowest + SPIKE)
        self.last_2.copy_(torch.where(before, torch.stack([loss, norm]), self.last_2))
        self.mean.copy_(torch.where(good, mean, self.mean))
        self.lowest.copy_(torch.minimum(self.lowest, self.mean))
        self.seen += good
        self.failed.copy_((~good).float())
        return self.failed

    def check(self) -> None:
        """Raises FloatingPointError naming the first failed step, counted from 1 from the start of
        the run, its loss and its gradient norm."""
        if not self.failed.item():
            return
        loss, norm = self.last_2.tolist()
        finite = self.last_2.isfinite().all().item()
        rule = f" lifts its running mean more than {SPIKE:g} above {self.lowest.item():.4g}"
        raise FloatingPointError(
            f"step {self.seen.item() + 1}: loss {loss:.4g}{rule if finite else ''}, "
            f"gradient norm {norm:.4g}"
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "lowest": self.lowest, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, held in self.state_dict().items():
            held.copy_(state[name])
