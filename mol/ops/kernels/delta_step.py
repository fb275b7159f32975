"""One step of Gated DeltaNet in Triton, all between the projection and the output product (3.2).

A state is read once and written once, 8 d^2 bytes a head in fp32, which is nearly all of the
traffic. Sums are fp32. Import this module on a machine with Triton only; the same mathematics in
PyTorch are `mol.ops.glue.delta_step`. No gradients.

Shape suffixes: N rows, S segments, E blocks, H heads, d head width, M = H d, C = 3 M channels
(q, k, v), J = 4 taps, Z = 4 M + 2 H columns of the projection (q, k, v, gate, a, b).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.mix_tiles import EPS, TAPS, softplus
from mol.ops.kernels.shares import row_strided


@triton.jit
def _part(tile, kind, KIND: tl.constexpr):
    """One row of a tile, as a vector."""
    return tl.sum(tl.where(kind == KIND, tile, 0.0), 0)


@triton.jit
def head_step(
    z, tail, state, filters, decay_log, dt_bias, norm, y, head, scale, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head's step of the gated delta rule (mol.ops.gated_delta), its convolution and gate:
    changes tail [3, C] and state [H, d, d], writes y [M]."""
    M: tl.constexpr = HEADS * WIDTH
    row, column = tl.arange(0, WIDE), tl.arange(0, WIDE)
    inside = column < WIDTH
    at = (head * WIDTH + row)[:, None] * WIDTH + column[None, :]
    mask = (row < WIDTH)[:, None] & inside[None, :]
    held = tl.load(state + at, mask=mask, other=0.0)
    # q, k, v and the gate are the rows of one tile: as vectors, fewer numbers than threads, they
    # would be loaded by each thread that needs one, in two layouts.
    kind = tl.arange(0, 4)[:, None]
    channel = kind * M + head * WIDTH + column[None, :]
    mixes = inside[None, :] & (kind < 3)
    new = tl.load(z + channel, mask=inside[None, :], other=0.0).to(tl.float32)
    one = tl.load(tail + 3 * M + channel, mask=mixes, other=0.0)
    two = tl.load(tail + 6 * M + channel, mask=mixes, other=0.0)
    x = tl.load(tail + channel, mask=mixes, other=0.0).to(tl.float32)
    taps = filters + channel * 4
    x *= tl.load(taps, mask=mixes, other=0.0).to(tl.float32)
    x += one.to(tl.float32) * tl.load(taps + 1, mask=mixes, other=0.0).to(tl.float32)
    x += two.to(tl.float32) * tl.load(taps + 2, mask=mixes, other=0.0).to(tl.float32)
    x += new * tl.load(taps + 3, mask=mixes, other=1.0).to(tl.float32)  # the gate as it is
    x *= tl.sigmoid(x)
    q, k, v, gate = _part(x, kind, 0), _part(x, kind, 1), _part(x, kind, 2), _part(x, kind, 3)
    a = tl.load(z + 4 * M + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    beta = tl.sigmoid(tl.load(z + 4 * M + HEADS + head).to(tl.float32))
    decay = tl.exp(-tl.exp(tl.load(decay_log + head).to(tl.float32)) * softplus(a))
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    held *= decay
    u = beta * (v - tl.sum(held * k[:, None], 0))
    # S'^T q with S' = held + k u^T, so that both sums over the state run at once.
    o = tl.sum(held * q[:, None], 0) + tl.sum(q * k, 0) * u
    o *= tl.rsqrt(tl.sum(o * o, 0) / WIDTH + eps)
    o *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32) * gate
    tl.store(y + head * WIDTH + column, o.to(y.dtype.element_ty), mask=inside)
    # Threads may hold copies of one value: all must have read before one of them writes.
    tl.debug_barrier()
    tl.store(state + at, held + k[:, None] * u[None, :], mask=mask)
    tl.store(tail + channel, one, mask=mixes)
    tl.store(tail + 3 * M + channel, two, mask=mixes)
    tl.store(tail + 6 * M + channel, new.to(tail.dtype.element_ty), mask=mixes)


@triton.jit
def _step(
    z, segments, blocks, tail, state, filters, decay_log, dt_bias, norm, y, scale, eps,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    M: tl.constexpr = HEADS * WIDTH
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    segment, block = tl.load(segments + row), tl.load(blocks + row)
    head_step(
        z + row * STRIDE, tail + segment * (9 * M), state + segment * (M * WIDTH),
        filters + block * (12 * M), decay_log + block * HEADS, dt_bias + block * HEADS,
        norm + block * WIDTH, y + row * M, head, scale, eps, HEADS, WIDTH, WIDE,
    )  # fmt: skip


def delta_step(
    z_NZ: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    norm_Ed: Tensor,
    tail_SJC: Tensor,
    state_SHdd: Tensor,
    segment_N: Tensor,
    block_N: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """One new row of segment `segment_N[n]` (distinct) and block `block_N[n]`, both int64: what
    the output product takes, [N, M] in z's precision.

    Changes the rows before the convolution, `tail_SJC` [S, 3, C], and the states, fp32; both
    contiguous. `z_NZ` may have its rows apart. Heads up to 128 wide.
    """
    assert tail_SJC.is_contiguous() and state_SHdd.is_contiguous()
    heads, width = state_SHdd.shape[1:3]
    assert filters_ECJ.shape[2] == TAPS
    z_NZ, wide = row_strided(z_NZ), triton.next_power_of_2(width)
    y_NM = torch.empty(z_NZ.shape[0], heads * width, dtype=z_NZ.dtype, device=z_NZ.device)
    _step[(z_NZ.shape[0] * heads,)](
        z_NZ, segment_N, block_N, tail_SJC, state_SHdd, filters_ECJ.contiguous(),
        decay_log_EH.contiguous(), dt_bias_EH.contiguous(), norm_Ed.contiguous(), y_NM,
        width**-0.5, eps, STRIDE=z_NZ.stride(0), HEADS=heads, WIDTH=width, WIDE=wide,
        num_warps=max(1, min(8, wide * wide // 1024)),
    )  # fmt: skip
    return y_NM
