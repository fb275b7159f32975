"""The middle of a fast decode step, from a block's input to its FFN's inner values.

Shape suffixes: N rows (S * B of shared blocks, then B * k of routed ones), M width of a block, F
its inner width, Z of its projections, H heads, d head width, P partial sums.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mol.model.attention import KVCache, SoftmaxAttention, check_room
from mol.model.delta import DeltaCache
from mol.model.step_tiles import Rows, depth, grid, power, tiled
from mol.ops.attention import Rope
from mol.ops.glue import EPS

CACHE_TILE = 4096  # numbers of keys, and as many of values, that it reads at once
PROGRAMS = 512  # wanted on a cache: about four for each multiprocessor of an H200


def inside(
    rows: Rows,
    shared: Any,
    routed: Any,
    parts_PNM: Tensor,
    rope: Rope,
    position: int | Tensor,
    shared_cache: KVCache | None,
    routed_cache: KVCache | DeltaCache | None,
) -> tuple[Tensor, Tensor]:
    """From h (the sum of its parts) to attended [N, M] and GELU(... W_in) [N, F]: four launches.
    Either kind of block may be absent (None)."""
    from mol.ops.kernels import decode
    from mol.ops.kernels.decode_parts import launch

    one, other = shared or routed, routed or shared
    width = parts_PNM.shape[2]
    norm_bias, eps = getattr(one, "attention_norm_bias", None), getattr(one, "eps", EPS)
    layer_norm = norm_bias is not None
    delta = rows.slots > 0 and not isinstance(routed.attention, SoftmaxAttention)
    ins = _input(one.attention), _input(other.attention)
    z_width = max(w.shape[-1] for w, _ in ins)
    h_NM, z_NZ = rows.new(rows.count, width), rows.new(rows.count, z_width)
    tiling = tiled(power(width))
    launch(
        decode.project, grid(rows.groups, z_width, tiling),
        parts_PNM, parts_PNM.stride(0), rows.block, one.attention_norm, other.attention_norm,
        norm_bias if layer_norm else one.attention_norm, ins[0][0], ins[1][0], ins[0][1],
        ins[1][1], h_NM, z_NZ, eps,
        **rows.sizes, SLOTS=rows.slots, K=width, M_SHARED=ins[0][0].shape[-1],
        M_ROUTED=ins[1][0].shape[-1], Z=z_width, PARTS=parts_PNM.shape[0], DELTA=delta,
        LAYER=layer_norm, **tiling,
    )  # fmt: skip
    attended_PNM = _attend(
        rows, one, other, z_NZ, delta, rope, position, shared_cache, routed_cache
    )
    counts = [
        c.used_S if isinstance(c, KVCache) else rows.block for c in (shared_cache, routed_cache)
    ]
    f_width = one.ffn_in.shape[-1]
    sums_NM, f_NF = torch.empty_like(h_NM), rows.new(rows.count, f_width)
    launch(
        decode.ffn_in, grid(rows.groups, f_width, tiling),
        h_NM, attended_PNM, attended_PNM.stride(0), rows.block, one.ffn_norm, other.ffn_norm,
        one.ffn_norm_bias if layer_norm else one.ffn_norm, one.ffn_in, other.ffn_in, *counts,
        sums_NM, f_NF, eps,
        **rows.sizes, SLOTS=rows.slots, K=width, M=f_width, PARTS=attended_PNM.shape[0],
        DELTA=delta, LAYER=layer_norm, **tiling,
    )  # fmt: skip
    return sums_NM, f_NF


def _input(attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Weights and biases; gated delta has none, and its weights stand in unread."""
    if isinstance(attention, SoftmaxAttention):
        return attention.qkv, attention.qkv_bias
    return attention.qkvg_ab, attention.qkvg_ab


def _attend(
    rows: Rows,
    one: Any,
    other: Any,
    z_NZ: Tensor,
    delta: bool,
    rope: Rope,
    position: int | Tensor,
    shared_cache: KVCache | None,
    routed_cache: KVCache | DeltaCache | None,
) -> Tensor:
    """The rows against their caches, then the output product: parts of it, [P, N, M]. What a kind
    of row does not have is stood in for by tensors that no program reads."""
    from mol.ops.kernels import decode_attention
    from mol.ops.kernels.decode_parts import launch

    attention, heads = one.attention, one.attention.n_heads
    width = attention.out.shape[-1]
    head_width = width // heads
    tables, room, parts, lines = (z_NZ, z_NZ), 1, 1, 16
    softmax = [c for c in (shared_cache, routed_cache) if isinstance(c, KVCache)]
    softmax_rows = rows.batch * (rows.shared + (0 if delta else rows.slots))
    if softmax:
        room = softmax[0].keys_SHLd.shape[2]
        if isinstance(position, int):
            check_room(softmax[0], position + 1)
        tables = rope.tables(room, z_NZ.device, torch.float32)
        lines = max(1, CACHE_TILE // power(head_width))
        wanted = max(1, min(64, PROGRAMS // (softmax_rows * heads), -(-room // lines)))
        parts = power(wanted)
    best, total = (rows.new(rows.count, heads, parts) for _ in range(2))
    part_o, mixed_NM = rows.new(*best.shape, head_width), rows.new(rows.count, width)
    keys_values_used = []
    for held in (shared_cache, routed_cache):
        held = held if isinstance(held, KVCache) else softmax[0] if softmax else None
        if held is None:
            keys_values_used += [z_NZ, z_NZ, rows.block]
        else:
            assert held.keys_SHLd.is_contiguous() and held.values_SHLd.is_contiguous()
            keys_values_used += [held.keys_SHLd, held.values_SHLd, held.used_S]
    recurrent = [z_NZ] * 6
    if delta:
        layer = other.attention if rows.shared else attention
        assert routed_cache.tail_SJC.is_contiguous() and routed_cache.state_SHdd.is_contiguous()
        recurrent = [
            routed_cache.tail_SJC, routed_cache.state_SHdd, layer.filters, layer.decay_log,
            layer.dt_bias, layer.norm,
        ]  # fmt: skip
    on_device = isinstance(position, Tensor)
    programs = (rows.count - softmax_rows) * heads + softmax_rows * heads * parts
    launch(
        decode_attention.mix, (programs,),
        z_NZ, rows.block, *keys_values_used, *recurrent, *tables, position, mixed_NM, best, total,
        part_o, head_width**-0.5, EPS, room,
        **rows.sizes, SLOTS=rows.slots, Z=z_NZ.shape[1], HEADS=heads, PARTS=parts,
        WIDTH=head_width, WIDE=power(head_width), ROWS=lines, DELTA=delta, ON_DEVICE=on_device,
        EACH=int(on_device and position.numel() > 1), maxnreg=128,
    )  # fmt: skip
    tiling = tiled(depth(width, 4)) | {"num_warps": 8}  # joining takes more than multiplying
    splits = -(-width // tiling["DEEP"])
    attended_PNM = rows.new(splits, rows.count, width)
    biases = [
        a.out_bias if isinstance(a, SoftmaxAttention) else a.out
        for a in (attention, other.attention)
    ]
    launch(
        decode_attention.attended, grid(rows.groups, width, tiling, splits),
        rows.block, mixed_NM, best, total, part_o, keys_values_used[2], keys_values_used[5],
        attention.out, other.attention.out, *biases, attended_PNM, attended_PNM.stride(0),
        **rows.sizes, SLOTS=rows.slots, HEADS=heads, PARTS=parts, WIDTH=head_width, ROWS=lines,
        AT_ONCE=min(parts, max(1, 4096 // tiling["DEEP"])), DELTA=delta, **tiling,
    )  # fmt: skip
    return attended_PNM
