"""A call recorded once as a CUDA graph and replayed: one launch in place of thousands.

CUDA only; there is nothing to record on a CPU, where callers use the function itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mol.ops.dispatch import forget_plans


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """`torch.cuda.graph(graph)`, with tables of its own: kept plans could be dropped while the
    graph still reads them, and those made inside hold nothing before the first replay."""
    forget_plans()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        forget_plans()


class Captured:
    """`function(*inputs)` as a CUDA graph.

        captured = Captured(step, ids_B)
        logits_BV = captured(other_ids_B)

    The inputs are copied into buffers of fixed address, whose shapes, precisions and device every
    later call must match; the result is one and the same output of each call, overwritten by the
    next. The function must read no tensor on the host, and whatever it changes in place (a cache,
    a position on the device) changes with each replay. It is called `WARMUP` times before the
    recording, so that kernels are compiled and tuned by then: state it advances has to be
    set again afterwards. No gradients are recorded.

    Raises ValueError for inputs that do not match.
    """

    WARMUP = 3

    def __init__(self, function: Callable, *inputs: Tensor):
        assert all(t.is_cuda for t in inputs), "a CUDA graph needs inputs on the GPU"
        self.inputs = tuple(t.clone() for t in inputs)
        with torch.no_grad():
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(self.WARMUP):
                    function(*self.inputs)
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            with recording(self.graph):
                self.output = function(*self.inputs)

    def __call__(self, *inputs: Tensor):
        if len(inputs) != len(self.inputs):
            raise ValueError(f"captured with {len(self.inputs)} inputs, called with {len(inputs)}")
        for held, given in zip(self.inputs, inputs, strict=True):
            if (held.shape, held.dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"captured with {held.dtype} {tuple(held.shape)}, "
                    f"called with {given.dtype} {tuple(given.shape)}"
                )
            held.copy_(given)
        self.graph.replay()
        return self.output
