"""One decode step of a layer in seven launches, or five at full width, by Triton's kernels.

Same results as `SplitStage.plain_step`, `FullWidthLayer.plain_step` and the head of
`LanguageModel.step`, which stay the reference and serve whatever `takes_...` refuses. Prefill fills
the same caches. Only shapes, buffers and launches here; `mol.ops.kernels.decode` says what runs.

Shape suffixes: N rows (S * B of shared blocks, then B * k of routed ones), B tokens, D = d_model,
M width of a block, F its inner width, H heads, d head width, V vocabulary, P partial sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mol.model.attention import KVCache, SoftmaxAttention, check_room
from mol.model.delta import DeltaCache
from mol.ops.attention import Rope
from mol.ops.glue import EPS
from mol.ops.tracing import untraced

# Beyond these, rows of one matrix should share its reads through matrix products.
MOST_ROWS = 32
MOST_TOKENS = 4  # at full width, where the longest product reads its weights once a token
MOST_WIDTH = 4096  # of what a program holds whole, in a tile of 4096 x 16
TILE = 32768  # weights that a program reads at once: 64 KiB in bf16
DEEPEST = 2048  # rows of a tile where one program adds up a whole column
CACHE_TILE = 4096  # numbers of keys, and as many of values, that it reads at once
PROGRAMS = 512  # wanted on a cache: about four for each multiprocessor of an H200


def takes_stage(stage: nn.Module, x_BD: Tensor) -> bool:
    """Whether `stage_step` can run this split stage on `x_BD`."""
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits_stage(stage, x_BD)


def takes_layer(layer: nn.Module, x_BD: Tensor) -> bool:
    """Whether `dense_step` can run this full-width layer (with a dense FFN) on `x_BD`."""
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits_layer(layer, x_BD)


def fits_stage(stage: nn.Module, x_BD: Tensor) -> bool:
    """What `takes_stage` asks on any device: precision and sizes."""
    config, (batch, width) = stage.config, x_BD.shape
    rows = batch * (config.n_shared + _slots(stage))
    return (
        config.rank1 is None
        and _one_precision(stage, x_BD)
        and rows <= MOST_ROWS
        and max(config.d_thin, width // 8, config.d_ff // 4) <= MOST_WIDTH
    )


def fits_layer(layer: nn.Module, x_BD: Tensor) -> bool:
    """What `takes_layer` asks on any device."""
    batch, width = x_BD.shape
    return _one_precision(layer, x_BD) and batch <= MOST_TOKENS and width <= MOST_WIDTH


def _one_precision(module: nn.Module, x: Tensor) -> bool:
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    autocast = torch.is_autocast_enabled(x.device.type)
    return known and not autocast and all(w.dtype == x.dtype for w in module.parameters())


def _slots(stage: nn.Module) -> int:
    return stage.config.n_routed if stage.full else stage.config.top_k


@dataclass(frozen=True)
class _Rows:
    """The rows of a step and the routed ones' blocks (int32 [B * k], known on the device)."""

    batch: int
    shared: int
    slots: int
    block: Tensor

    @property
    def count(self) -> int:
        return self.batch * (self.shared + self.slots)

    @property
    def groups(self) -> int:
        return self.shared + self.batch * self.slots

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": self.batch, "S": self.shared}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.block.device)


@dataclass(frozen=True)
class _FullWidth:
    """A full-width layer under the names of `ThinBlocks`; with biases its norms are LayerNorm."""

    attention: nn.Module
    attention_norm: Tensor
    ffn_norm: Tensor
    ffn_in: Tensor
    attention_norm_bias: Tensor | None
    ffn_norm_bias: Tensor | None
    eps: float


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _deep(width: int, splits: int, least: int = 16) -> int:
    """Rows of a tile, a power of two, such that at most `splits` tiles cover `width`."""
    return max(least, _power(-(-width // splits)))


def _tiling(deep: int) -> dict[str, int]:
    columns = max(16, min(64, TILE // deep))
    return {"DEEP": deep, "COLUMNS": columns, "num_warps": _warps(deep * columns)}


def _warps(weights: int) -> int:
    """Up to 128 weights a thread."""
    return max(4, min(16, weights // 4096))


def _grid(groups: int, width: int, tiling: dict[str, int], splits: int = 1) -> tuple[int, int, int]:
    return groups, -(-width // tiling["COLUMNS"]), splits


@untraced
def stage_step(
    stage: nn.Module, x_BD: Tensor, rope: Rope, position: int | Tensor, cache: Any
) -> Tensor:
    """`SplitStage.step`, [B, D]; changes `cache` (a `StageCache`)."""
    from mol.ops.kernels import decode

    config, routed, x_BD = stage.config, stage.routed, x_BD.contiguous()
    shared = stage.shared or routed
    (batch, width), thin, slots = x_BD.shape, config.d_thin, _slots(stage)
    block = torch.empty(batch * slots, dtype=torch.int32, device=x_BD.device)
    rows = _Rows(batch, config.n_shared, slots, block)
    weight = rows.new(batch * slots)
    tiling, experts = _tiling(_deep(width, 8, least=DEEPEST // 4)), _power(config.n_routed)
    splits = -(-width // tiling["DEEP"])
    h_PNM = rows.new(splits, rows.count, thin)
    router = routed.down if stage.router is None else stage.router  # not read without router
    decode.launch(
        decode.down, _grid(rows.groups, thin, tiling, splits),
        x_BD, router, shared.down, routed.down, block, weight, h_PNM, h_PNM.stride(0),
        **rows.sizes, SLOTS=slots, BLOCKS=config.n_routed, EXPERTS=experts, TOP_K=config.top_k,
        ROUTER=stage.router is not None, ALL=stage.full,
        RENORMALIZE=config.weights_over == "selected",
        CHUNK=min(_power(width), max(16, TILE // experts)), D=width, M=thin, **tiling,
    )  # fmt: skip
    sums_NM, f_NF = _inside(
        rows, stage.shared, routed, h_PNM, rope, position, cache.shared, cache.routed
    )
    tiling = _tiling(_deep(config.d_ff, 4))
    splits = -(-config.d_ff // tiling["DEEP"])
    parts_PNM = rows.new(splits, rows.count, thin)
    decode.launch(
        decode.ffn_out, _grid(rows.groups, thin, tiling, splits),
        f_NF, block, shared.ffn_out, routed.ffn_out, parts_PNM, parts_PNM.stride(0),
        **rows.sizes, K=config.d_ff, M=thin, **tiling,
    )  # fmt: skip
    ups = shared.up, routed.up
    return _up(rows, x_BD, None, sums_NM, parts_PNM, weight, *ups, stage.scales)


@untraced
def dense_step(
    layer: nn.Module, x_BD: Tensor, rope: Rope, position: int | Tensor, cache: Any
) -> Tensor:
    """`FullWidthLayer.step` with a dense FFN, [B, D]; changes `cache`. Softmax attention counts as
    one shared block, gated delta as one routed block that every token chooses."""
    x_BD, softmax = x_BD.contiguous(), isinstance(layer.attention, SoftmaxAttention)
    first, second = layer.attention_norm, layer.ffn_norm
    # Softmax reads no block, and zeros are a launch.
    make = torch.empty if softmax else torch.zeros
    block = make(x_BD.shape[0], dtype=torch.int32, device=x_BD.device)
    rows = _Rows(x_BD.shape[0], int(softmax), int(not softmax), block)
    full = _FullWidth(
        layer.attention, first.weight, second.weight, layer.ffn.w_in,
        getattr(first, "bias", None), getattr(second, "bias", None), first.eps,
    )  # fmt: skip
    pairs = (full, None, cache, None) if softmax else (None, full, None, cache)
    shared, routed, *caches = pairs
    sums_ND, f_NF = _inside(rows, shared, routed, x_BD[None], rope, position, *caches)
    out, whole = layer.ffn.w_out, _Rows(rows.batch, 1, 0, block)
    return _up(whole, x_BD, sums_ND, f_NF, None, None, out, out, (1.0, 1.0))


def _inside(
    rows: _Rows,
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

    one, other = shared or routed, routed or shared
    width = parts_PNM.shape[2]
    norm_bias, eps = getattr(one, "attention_norm_bias", None), getattr(one, "eps", EPS)
    layer_norm = norm_bias is not None
    delta = rows.slots > 0 and not isinstance(routed.attention, SoftmaxAttention)
    ins = _input(one.attention), _input(other.attention)
    z_width = max(w.shape[-1] for w, _ in ins)
    h_NM, z_NZ = rows.new(rows.count, width), rows.new(rows.count, z_width)
    tiling = _tiling(_power(width))
    decode.launch(
        decode.project, _grid(rows.groups, z_width, tiling),
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
    decode.launch(
        decode.ffn_in, _grid(rows.groups, f_width, tiling),
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
    rows: _Rows,
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
    from mol.ops.kernels import decode, decode_attention

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
        lines = max(1, CACHE_TILE // _power(head_width))
        wanted = max(1, min(64, PROGRAMS // (softmax_rows * heads), -(-room // lines)))
        parts = _power(wanted)
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
    decode.launch(
        decode_attention.mix, (programs,),
        z_NZ, rows.block, *keys_values_used, *recurrent, *tables, position, mixed_NM, best, total,
        part_o, head_width**-0.5, EPS, room,
        **rows.sizes, SLOTS=rows.slots, Z=z_NZ.shape[1], HEADS=heads, PARTS=parts,
        WIDTH=head_width, WIDE=_power(head_width), ROWS=lines, DELTA=delta, ON_DEVICE=on_device,
        EACH=int(on_device and position.numel() > 1), maxnreg=128,
    )  # fmt: skip
    tiling = _tiling(_deep(width, 4)) | {"num_warps": 8}  # joining takes more than multiplying
    splits = -(-width // tiling["DEEP"])
    attended_PNM = rows.new(splits, rows.count, width)
    biases = [
        a.out_bias if isinstance(a, SoftmaxAttention) else a.out
        for a in (attention, other.attention)
    ]
    decode.launch(
        decode_attention.attended, _grid(rows.groups, width, tiling, splits),
        rows.block, mixed_NM, best, total, part_o, keys_values_used[2], keys_values_used[5],
        attention.out, other.attention.out, *biases, attended_PNM, attended_PNM.stride(0),
        **rows.sizes, SLOTS=rows.slots, HEADS=heads, PARTS=parts, WIDTH=head_width, ROWS=lines,
        AT_ONCE=min(parts, max(1, 4096 // tiling["DEEP"])), DELTA=delta, **tiling,
    )  # fmt: skip
    return attended_PNM


def _up(
    rows: _Rows,
    x_BD: Tensor,
    added_ND: Tensor | None,
    values_NK: Tensor,
    parts_PNK: Tensor | None,
    weight: Tensor | None,
    w_shared: Tensor,
    w_routed: Tensor,
    scales: tuple[float, float],
) -> Tensor:
    """x (+ added) + scaled sums of the token's rows times their last matrices, [B, D]."""
    from mol.ops.kernels import decode

    (batch, out), width = x_BD.shape, values_NK.shape[1]
    y_BD, columns = torch.empty_like(x_BD), 16
    deep = [min(DEEPEST, _power(max(1, n) * width)) for n in (rows.shared, rows.slots)]
    n_parts, stride = (0, 0) if parts_PNK is None else (parts_PNK.shape[0], parts_PNK.stride(0))
    decode.launch(
        decode.up, (batch, -(-out // columns)),
        x_BD, values_NK if added_ND is None else added_ND, values_NK,
        values_NK if parts_PNK is None else parts_PNK, stride, rows.block,
        values_NK if weight is None else weight, w_shared, w_routed, y_BD, *scales,
        **rows.sizes, SLOTS=rows.slots, K=width, M=out, PARTS=n_parts, ADD=added_ND is not None,
        DEEP_SHARED=deep[0], DEEP_ROUTED=deep[1], COLUMNS=columns,
        num_warps=_warps(max(deep) * columns),
    )  # fmt: skip
    return y_BD


def takes_head(norm: nn.Module, x_BD: Tensor, embedding_VD: Tensor) -> bool:
    """Whether `head_step` can run the final norm and the product with the embedding."""
    fits = _one_precision(norm, x_BD) and embedding_VD.dtype == x_BD.dtype
    few = x_BD.shape[0] <= MOST_TOKENS and x_BD.shape[1] <= MOST_WIDTH
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits and few


@untraced
def head_step(norm: nn.Module, x_BD: Tensor, embedding_VD: Tensor) -> Tensor:
    """Logits [B, V] of norm(x), one launch."""
    from mol.ops.kernels import decode

    x_BD = x_BD.contiguous()
    batch, (vocabulary, width) = x_BD.shape[0], embedding_VD.shape
    y_BV = x_BD.new_empty(batch, vocabulary)
    bias = getattr(norm, "bias", None)
    lines = max(1, min(16, TILE // _power(width)))
    decode.launch(
        decode.logits, (-(-vocabulary // lines),),
        x_BD, norm.weight, norm.weight if bias is None else bias, embedding_VD, y_BV, norm.eps,
        B=batch, K=width, M=vocabulary, LAYER=bias is not None, DEEP=_power(width), LINES=lines,
        num_warps=_warps(lines * _power(width)),
    )  # fmt: skip
    return y_BV
