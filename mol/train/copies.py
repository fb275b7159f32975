"""bf16 copies of the matrices, made all at once where autocast would cast them one by one.

Autocast launches a kernel for each weight and another for each gradient, and with recomputed
layers casts twice. The values are the same: one rounding of the weight, and the gradient that
the product gives in bf16, widened.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Attributes that are multiplied in autocast's precision and nothing else. Not the embedding, whose
# rows are looked up in fp32, nor routers, norms, biases and rates, which kernels read in fp32.
MULTIPLIED = frozenset(
    {"qkv", "qkvg_ab", "out", "down", "up", "ffn_in", "ffn_out", "w_in", "w_out", "u", "v"}
)


class Copies:
    """The copies of one model.

    copies = Copies(model)
    with copies.in_place():    # around forward and backward: layers may be computed again
        model(ids).hidden.sum().backward()
    """

    def __init__(self, model: nn.Module):
        self.places = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if name in MULTIPLIED
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's modules hold the copies, from which gradients flow to the weights."""
        copies = _Cast.apply(*(weight for _, _, weight in self.places))
        for (module, name, _), copy in zip(self.places, copies, strict=True):
            module._parameters[name] = copy
        try:
            yield
        finally:
            for module, name, weight in self.places:
                module._parameters[name] = weight


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *weights: Tensor) -> tuple[Tensor, ...]:
        copies = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        torch._foreach_copy_(copies, weights)
        return tuple(copies)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(wide, grads)
        return tuple(wide)
