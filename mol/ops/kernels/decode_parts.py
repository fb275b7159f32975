"""What the kernels of a decode step share: their launch, which rows belong to which matrix, tiles,
and rows summed and normed as they are loaded. Shape suffixes as in `mol.ops.kernels.decode`."""

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def overlap() -> bool:
    """Whether kernels use programmatic dependent launch, which GPUs have since Hopper: a kernel
    starts while the one before it ends, and reads weights meanwhile. Each lets the next one start
    only once its own predecessor is done, so whatever two launches ago wrote may be read before
    the wait."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """One launch of a kernel of this package that takes `PDL`."""
    if overlap():
        meta["launch_pdl"] = True
    kernel[grid](*args, PDL=overlap(), **meta)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def group_of(block, group, B: tl.constexpr, S: tl.constexpr):
    """First row of a group, how many it has, and the number of its matrix in its own stack."""
    shared = group < S
    first = tl.where(shared, group * B, S * B + group - S)
    number = tl.load(block + group - S, mask=group >= S, other=0)
    return first, tl.where(shared, B, 1), tl.where(shared, group, number).to(tl.int64)


@triton.jit
def tile_of(
    w, first, number, K: tl.constexpr, M: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows first .. first + DEEP of the columns of tile `number`, zeros outside the matrix."""
    k, column = first + tl.arange(0, DEEP), number * COLUMNS + tl.arange(0, COLUMNS)
    mask = (k < K)[:, None] & (column < M)[None, :]
    return tl.load(w + k[:, None] * M + column[None, :], mask=mask, other=0.0)


@triton.jit
def product(tile, x):
    return tl.sum(tile.to(tl.float32) * x[:, None], 0)


@triton.jit
def sum_parts(parts, stride, row, k, inside, K: tl.constexpr, PARTS: tl.constexpr):
    """A row's sum over partial products [P, N, K]."""
    total = tl.load(parts + row * K + k, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + row * K + k, mask=inside, other=0.0)
    return total


@triton.jit
def normed(x, inside, k, weight, bias, eps, K: tl.constexpr, LAYER: tl.constexpr):
    """RMSNorm, or LayerNorm with its bias, of a row that is zero outside its width."""
    gain = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * gain
    if LAYER:
        y += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    return y
