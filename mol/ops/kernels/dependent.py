"""Programmatic dependent launch: a kernel starts while the one before it ends.

The one rule: every program of a kernel that is launched so calls `wait_for_inputs` before it reads
what any earlier kernel wrote, and before it writes at all: memory is used again in the stream's
order, so its outputs may lie where a kernel that still runs reads. Weights may be read before.
Each kernel lets the next one start only once its own predecessor is done, so that whatever two
launches ago wrote may be read before the wait. A kernel that knows nothing of this, or that stands
on another stream, is waited for to its end.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

_state = threading.local()


@functools.cache
def overlap() -> bool:
    """Whether the GPU can, as all since Hopper."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside, this thread's kernels start when those before them have ended."""
    before, _state.one_by_one = getattr(_state, "one_by_one", False), True
    try:
        yield
    finally:
        _state.one_by_one = before


def launch(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """One launch of a kernel of this package that takes `PDL`."""
    dependent = overlap() and not getattr(_state, "one_by_one", False)
    if dependent:
        meta["launch_pdl"] = True
    kernel[grid](*args, PDL=dependent, **meta)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(x, part, parts, BYTES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr):
    """Part `part` of `parts` of BYTES (a multiple of 16) of weights from x on into the L2 cache,
    before the wait and by THREADS threads."""
    if PDL and BYTES > 0:
        PIECE: tl.constexpr = 2048 if BYTES % 2048 == 0 else 16
        PIECES: tl.constexpr = BYTES // PIECE
        start = x.to(tl.int64)
        for first in range(part * THREADS, PIECES, parts * THREADS):
            piece = tl.minimum(first + tl.arange(0, THREADS), PIECES - 1)
            size = tl.full([THREADS], PIECE, tl.int32)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                [start + piece.to(tl.int64) * PIECE, size], tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
