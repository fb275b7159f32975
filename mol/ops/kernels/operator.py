"""An operator of the project's kernels, with as little as possible around it."""

import functools
from collections.abc import Callable

import torch


class Operator:
    """A custom operator of torch where gradients or a trace are recorded, else the bare function.

    The way through torch's dispatcher takes the host longer than a small kernel takes the GPU, so
    that a prompt that is not replayed from a graph would wait for it. Backward operators stay
    torch's: a tracer calls them without gradients, and cannot be told from a run there.
    """

    def __init__(self, name: str, function: Callable):
        self.function = function
        self.recorded = torch.library.custom_op(name, mutates_args=())(function)
        self.register_fake = self.recorded.register_fake
        self.register_autograd = self.recorded.register_autograd
        functools.update_wrapper(self, function)

    def __call__(self, *args, **named):
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.recorded(*args, **named)
        return self.function(*args, **named)


def operator(name: str) -> Callable[[Callable], Operator]:
    """Decorator: make a function that launches kernels and changes none of its arguments the
    operator `name`."""
    return lambda function: Operator(name, function)
