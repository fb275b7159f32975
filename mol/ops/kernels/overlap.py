"""Kernels that start while the one before them ends: programmatic dependent launch."""

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def overlaps() -> bool:
    """Whether kernels use it; GPUs have it since Hopper. A kernel is set up, and its programs take
    what room there is, while the one before it ends. Each lets the next one start only once its
    own predecessor is done, so whatever two launches ago wrote may be read before the wait."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def enqueue(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """One launch of a kernel that takes `PDL` and calls `wait_for_inputs` before it writes anything
    or reads what the launch before it wrote."""
    if overlaps():
        meta["launch_pdl"] = True
    kernel[grid](*args, PDL=overlaps(), **meta)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for all earlier kernels, then let the next one be set up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
