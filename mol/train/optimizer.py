"""AdamW as in 4.2. Weight decay acts on matrices; the paper does not say on what it acts, and
norms, biases and per-head scalars are left out as is usual."""

import torch
from torch import nn
from torch.optim.adamw import adamw

from mol.plan.spec import OptimSpec


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Stacked per-block vectors ([E, d]) are vectors all the same: the name tells."""
    vector = any(word in name for word in ("norm", "bias", "decay_log", "dt_bias", "temperature"))
    return parameter.ndim >= 2 and not vector


class AdamW:
    """AdamW through torch's own fused kernel, with one state for all parameters.

    `torch.optim.AdamW` computes the same, but imports the compiler (1.4 s of a run's start) to
    keep itself out of traces that are never made here.
    """

    def __init__(self, model: nn.Module, optim: OptimSpec):
        named = dict(model.named_parameters())
        self.decayed = {name for name, weight in named.items() if is_decayed(name, weight)}
        self.optim = optim
        self.weights = named
        self.first = {name: torch.zeros_like(weight) for name, weight in named.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in named.items()}
        self.steps = {
            name: torch.zeros((), dtype=torch.float32, device=weight.device)
            for name, weight in named.items()
        }

    @torch.no_grad()
    def step(self, lr: torch.Tensor, skipped: torch.Tensor) -> None:
        """One update at learning rate `lr`, or none where `skipped` is 1 and not 0 (both 0-dim,
        fp32, on the weights' device); parameters without a gradient stay as they are."""
        beta1, beta2 = self.optim.betas
        with_grad = [name for name, weight in self.weights.items() if weight.grad is not None]
        for decay in (True, False):
            names = [name for name in with_grad if (name in self.decayed) is decay]
            adamw(
                [self.weights[name] for name in names],
                [self.weights[name].grad for name in names],
                [self.first[name] for name in names],
                [self.second[name] for name in names],
                [],
                [self.steps[name] for name in names],
                fused=True,
                found_inf=skipped,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=self.optim.weight_decay if decay else 0.0,
                eps=1e-8,
                maximize=False,
            )

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"first": self.first, "second": self.second, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Copy a saved state in place. Raises KeyError when parameters differ."""
        for kind, tensors in self.state_dict().items():
            if tensors.keys() != state[kind].keys():
                raise KeyError(f"optimizer state {kind!r} is of another model")
            for name, tensor in tensors.items():
                tensor.copy_(state[kind][name])
