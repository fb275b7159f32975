"""Functions that a compiler must not trace, marked without importing the compiler.

`torch.compiler.disable` imports all of TorchDynamo, 1.4 s of every start; here that happens only
where something is compiled.
"""

import functools
from collections.abc import Callable

import torch

_functions: dict[str, Callable] = {}


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the project's Triton kernels take this tensor: any on CUDA but fp64."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def untraced(function: Callable) -> Callable:
    """Mark a function whose sizes are host numbers: a trace would be redone for each batch."""
    name = f"{function.__module__}.{function.__qualname__}"
    _functions[name] = function

    @functools.wraps(function)
    def call(*args, **kwargs):
        return _functions[name](*args, **kwargs)

    return call


def compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """`torch.compile`, with the marked functions left to run as they are. `dynamic`: one trace
    for all sizes, slower than a trace each."""
    for name, marked in _functions.items():
        if not hasattr(marked, "_torchdynamo_disable"):
            _functions[name] = torch.compiler.disable(marked)
    return torch.compile(function, dynamic=dynamic)
