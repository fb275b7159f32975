"""flash-linear-attention's kernels behind the packed-segment interface (CUDA only).

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width.
"""

import torch
from torch import Tensor

CHUNK = 64  # rows a chunk of the kernel


def chunk_table(cu_seqlens: Tensor, rows: int) -> Tensor:
    """(segment, chunk in the segment) of every chunk, [rows // 64 + S, 2], built on the device.

    The size is the most that `rows` rows in S segments can need, so the host never reads the
    lengths and a CUDA graph can hold the call. Spare entries name a chunk past the end of the last
    segment, which the kernels mask away whole.
    """
    segments = cu_seqlens.numel() - 1
    chunks_S = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends_S = chunks_S.cumsum(0)
    index = torch.arange(rows // CHUNK + segments, device=cu_seqlens.device)
    segment = torch.searchsorted(ends_S, index, right=True)
    used = segment < segments
    segment = segment.clamp(max=segments - 1)
    chunk = index - (ends_S - chunks_S)[segment]
    past = rows // CHUNK + 1
    return torch.stack([segment, torch.where(used, chunk, past)], 1)


def fla_gated_delta_rule(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHe: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
    state_SHde: Tensor | None = None,
    final_state: bool = False,
    unit: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Same contract as `gated_delta_rule`. The kernels multiply in bf16 or TF32."""
    # Importing fla fails on a machine without Triton.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    cu_seqlens = cu_seqlens.long()
    output, state = chunk_gated_delta_rule(
        *(t.contiguous()[None] for t in (q_NHd, k_NHd, v_NHe, g_NH.float(), beta_NH)),
        initial_state=state_SHde,
        output_final_state=final_state,
        use_qk_l2norm_in_kernel=not unit,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_table(cu_seqlens, q_NHd.shape[0]),
    )
    return output[0], state
