"""Work beside other work on one GPU: a second stream, in which independent kernels overlap."""

import functools

import torch
from torch import Tensor


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class aside:  # noqa: N801 (used as a statement, like torch.no_grad)
    """Inside, kernels go to a second stream; `join` makes the first one wait for them.

        with aside(x) as beside:
            y = f(x)
        z = g(x)  # may run at the same time
        beside.join()

    Only on CUDA, and only where no gradients are recorded: elsewhere both run in order. Each use
    begins after all earlier work and is joined before later work, so memory freed on either
    stream is not taken again too early.
    """

    def __init__(self, x: Tensor):
        self.stream = None
        if x.is_cuda and not torch.is_grad_enabled():
            self.stream = _second_stream(x.device)

    def __enter__(self) -> "aside":
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self.inside = torch.cuda.stream(self.stream)
            self.inside.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.stream is not None:
            self.inside.__exit__(*error)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
