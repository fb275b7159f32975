"""Tells on the device whether a step's loss went wrong, and keeps that step from the weights.

A step fails when its loss or gradient norm is not finite, or when its loss lies more than `SPIKE`
nats above the running mean of the steps before it (weight 1/10 for each new one). Two nats are far
beyond the noise of a batch, a factor of 7 in perplexity.
"""

import torch
from torch import Tensor

SPIKE = 2.0
WEIGHT = 0.1  # of a new loss in the running mean


class Guard:
    """Running mean of the loss, steps seen, and whether one failed; all on the device.

    failed = guard.judge(loss, norm)   # 0-dim, 1.0 from the first failed step on
    guard.check()                      # waits for the device
    """

    def __init__(self, device: torch.device):
        self.mean = torch.zeros((), device=device)
        self.seen = torch.zeros((), device=device, dtype=torch.int64)
        self.failed = torch.zeros((), device=device)
        self.last_2 = torch.zeros(2, device=device)  # loss and norm, those of the failed step

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Takes a step's loss and gradient norm into account; `failed` as it then is."""
        loss, norm = loss.float(), norm.float()
        mean = torch.where(self.seen == 0, loss, self.mean)
        good = loss.isfinite() & norm.isfinite() & (loss <= mean + SPIKE) & (self.failed == 0)
        self.last_2.copy_(torch.where(self.failed == 0, torch.stack([loss, norm]), self.last_2))
        self.mean.copy_(torch.where(good, mean + WEIGHT * (loss - mean), self.mean))
        self.seen += good
        self.failed.copy_((~good).float())
        return self.failed

    def check(self) -> None:
        """Raises FloatingPointError naming the first failed step, counted from 1 from the start of
        the run, its loss, its gradient norm and the mean before it."""
        if not self.failed.item():
            return
        loss, norm = self.last_2.tolist()
        finite = torch.isfinite(self.last_2).all().item()
        rule = f", more than {SPIKE:g} above the running mean {self.mean.item():.4g}"
        raise FloatingPointError(
            f"step {self.seen.item() + 1}: loss {loss:.4g}{rule if finite else ''}, "
            f"gradient norm {norm:.4g}"
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, held in self.state_dict().items():
            held.copy_(state[name])
