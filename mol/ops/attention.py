"""Causal softmax attention over equal or packed segments, and rotary positions.

Shape suffixes: B sequences, T positions, H heads, d head width, R = d / 2 rotation planes,
N packed rows, S segments, L longest segment.

    rope = Rope(head_dim=64)                       # shared by every width with that head
    q_NHd = rope(q_NHd, time_N, length)            # time_N < length, original positions
    o_NHd = segment_attention(q_NHd, k_NHd, v_NHd, cu_seqlens, longest=length)
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops.attention_by import by_package, flash_attn
from mol.ops.tracing import has_kernels, untraced


class Rope:
    """Rotary positions, half-split pairs (x_i, x_{i + d/2}), base 10,000 by default (2.2).

    Tables grow on demand to the next power of two and are kept per device and precision (fp32, or
    fp64 for fp64 models), outside any module: casts of the model never touch them.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0):
        if head_dim % 2:
            raise ValueError(f"head_dim = {head_dim} is odd; RoPE needs an even head width")
        self.head_dim = head_dim
        self.base = base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # a recorded CUDA graph may read them

    def tables(self, length: int, device: torch.device, dtype: torch.dtype):
        """(cos_TR, sin_TR) with at least `length` rows."""
        key = (torch.device(device), dtype)
        held = self._tables.get(key)
        if held is None or held[0].shape[0] < length:
            # Held across calls, so they must not be inference tensors, which backward refuses.
            with torch.inference_mode(False), torch.no_grad():
                half = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
                rates_R = self.base ** (-half / self.head_dim)
                size = 1 << max(length - 1, 255).bit_length()
                time_T = torch.arange(size, dtype=torch.float64, device="cpu")
                angle_TR = torch.outer(time_T, rates_R)
                if held is not None:
                    self._outgrown.append(held)
                held = tuple(
                    t.to(device=device, dtype=dtype) for t in (angle_TR.cos(), angle_TR.sin())
                )
            self._tables[key] = held
        return held

    def __call__(self, x_NHd: Tensor, time_N: Tensor | int, length: int) -> Tensor:
        """Rotate each row to its position below `length`: an int or [1] for all, or one a row."""
        dtype = torch.float64 if x_NHd.dtype == torch.float64 else torch.float32
        cos_TR, sin_TR = self.tables(length, x_NHd.device, dtype)
        cos, sin = cos_TR[time_N].unsqueeze(-2), sin_TR[time_N].unsqueeze(-2)
        a, b = x_NHd.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x_NHd.dtype)


def segment_attention(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, cu_seqlens: Tensor, longest: int
) -> Tensor:
    """Causal attention inside each packed segment, [N, H, d]; scale d^-0.5.

    `cu_seqlens` int32 [S + 1]; `longest` bounds the segments. When S * longest = N the segments
    are equal and no table is read. Otherwise bf16 on CUDA takes the variable-length kernel, and
    the rest pads the segments into a batch (causality hides the padding from the rows that count).
    `mol.ops.attention_by` names another library for it.
    """
    if by_package():
        return flash_attn(q_NHd, k_NHd, v_NHd, cu_seqlens, longest)
    rows, heads, width = q_NHd.shape
    segments = cu_seqlens.numel() - 1
    if segments * longest == rows:
        batch = (
            t.view(segments, longest, heads, width).transpose(1, 2) for t in (q_NHd, k_NHd, v_NHd)
        )
        o_SHLd = F.scaled_dot_product_attention(*batch, is_causal=True)
        return o_SHLd.transpose(1, 2).reshape(rows, heads, width)
    if q_NHd.device.type == "cuda" and q_NHd.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_NHd, k_NHd, v_NHd, cu_seqlens, longest)
    return _padded(q_NHd, k_NHd, v_NHd, cu_seqlens)


@untraced
def _padded(q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, cu_seqlens: Tensor) -> Tensor:
    counts_S = cu_seqlens.diff()
    counts_S = counts_S[counts_S > 0]
    length = int(counts_S.max())
    slot_N = _slots(counts_S, length)
    batch = (
        _pad(t, slot_N, counts_S.numel(), length).transpose(1, 2) for t in (q_NHd, k_NHd, v_NHd)
    )
    o_SHLd = F.scaled_dot_product_attention(*batch, is_causal=True)
    return o_SHLd.transpose(1, 2).flatten(0, 1).index_select(0, slot_N)


def _slots(counts_S: Tensor, length: int) -> Tensor:
    """Row of each packed row in a batch of segments padded to `length`."""
    segment_N = torch.repeat_interleave(counts_S)
    first_S = counts_S.cumsum(0) - counts_S
    within_N = torch.arange(segment_N.numel(), device=counts_S.device) - first_S[segment_N]
    return segment_N * length + within_N


def _pad(x_NHd: Tensor, slot_N: Tensor, segments: int, length: int) -> Tensor:
    padded = x_NHd.new_zeros(segments * length, *x_NHd.shape[1:])
    return padded.index_copy(0, slot_N, x_NHd).view(segments, length, *x_NHd.shape[1:])


@untraced
def _varlen(q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, cu_seqlens: Tensor, longest: int):
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    qkv = (t.contiguous() for t in (q_NHd, k_NHd, v_NHd))
    return varlen_attn(*qkv, cu_seqlens, cu_seqlens, longest, longest, **causal)


@untraced
def step_in_cache(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    keys_SHLd: Tensor,
    values_SHLd: Tensor,
    segment_N: Tensor,
    used_S: Tensor,
    longest: int,
) -> Tensor:
    """Append row n to segment `segment_N[n]` and attend to all it then holds, [N, H, d].

    Changes the caches and `used_S`, the rows that each segment holds, of which `longest` bounds
    the new values. No segment twice, no gradients. On CUDA a kernel reads the lengths there, so
    that one captured graph serves every length; the library's attention takes them as shapes.
    Untraced, as a compiler would have to prove that the caches can be written in place.
    """
    if has_kernels(q_NHd):
        from mol.ops.kernels import cache_attention

        return cache_attention.step_in_cache(
            q_NHd, k_NHd, v_NHd, keys_SHLd, values_SHLd, segment_N, used_S
        )
    return step_in_cache_reference(
        q_NHd, k_NHd, v_NHd, keys_SHLd, values_SHLd, segment_N, used_S, longest
    )


def step_in_cache_reference(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    keys_SHLd: Tensor,
    values_SHLd: Tensor,
    segment_N: Tensor,
    used_S: Tensor,
    longest: int,
) -> Tensor:
    """The same with a mask over a copy of the segments' first `longest` rows."""
    used_N = used_S[segment_N]
    keys_SHLd[segment_N, :, used_N] = k_NHd
    values_SHLd[segment_N, :, used_N] = v_NHd
    used_S[segment_N] = used_N + 1
    keys, values = (t[segment_N, :, :longest] for t in (keys_SHLd, values_SHLd))
    mask = torch.arange(longest, device=used_N.device) <= used_N[:, None]
    return F.scaled_dot_product_attention(
        q_NHd[:, :, None], keys, values, attn_mask=mask[:, None, None]
    )[:, :, 0]


def extend_in_cache(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    keys_SHLd: Tensor,
    values_SHLd: Tensor,
    segment_N: Tensor,
    within_N: Tensor,
    used_S: Tensor,
    longest: int,
    longest_new: int,
) -> Tensor:
    """Append row n as the `within_N[n]`-th new one of its segment and attend to what the segment
    held before and to its new rows up to n, [N, H, d].

    Changes the caches, not `used_S`, the rows that each segment held. `longest` bounds the rows
    that a segment then holds, `longest_new` its new ones. No gradients. The library's attention
    over padded segments with a mask, since its causal kernels start at row 0.
    """
    place_N = used_S[segment_N] + within_N
    keys_SHLd[segment_N, :, place_N] = k_NHd.to(keys_SHLd.dtype)
    values_SHLd[segment_N, :, place_N] = v_NHd.to(values_SHLd.dtype)
    segments, (_, heads, width) = used_S.numel(), q_NHd.shape
    q_STHd = q_NHd.new_zeros(segments, longest_new, heads, width)
    q_STHd[segment_N, within_N] = q_NHd
    new_T = torch.arange(longest_new, device=used_S.device)
    last_ST = (used_S[:, None] + new_T).clamp(max=longest - 1)
    mask_STL = torch.arange(longest, device=used_S.device) <= last_ST[..., None]
    keys, values = (t[:, :, :longest].to(q_NHd.dtype) for t in (keys_SHLd, values_SHLd))
    o_SHTd = F.scaled_dot_product_attention(
        q_STHd.transpose(1, 2), keys, values, attn_mask=mask_STL[:, None]
    )
    return o_SHTd.transpose(1, 2)[segment_N, within_N]


def segment_attention_reference(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Scores of all pairs of rows, masked to the same segment and the past."""
    rows, _, width = q_NHd.shape
    row_N = torch.arange(rows, device=q_NHd.device)
    segment_N = torch.searchsorted(cu_seqlens[1:].contiguous(), row_N, right=True)
    seen = (segment_N[:, None] == segment_N) & (row_N[:, None] >= row_N)
    scores_HNN = torch.einsum("nhd,mhd->hnm", q_NHd, k_NHd) * width**-0.5
    return torch.einsum(
        "hnm,mhd->nhd", scores_HNN.masked_fill(~seen, -torch.inf).softmax(-1), v_NHd
    )
