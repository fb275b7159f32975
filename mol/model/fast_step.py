"""One decode step of a layer in seven launches, or five at full width, by Triton's kernels.

For few rows: each reads its block's matrices by itself. Same results as `SplitStage.plain_step`,
`FullWidthLayer.plain_step` and the head of `LanguageModel.step`, which stay the reference and serve
whatever `takes_...` refuses. Prefill fills the same caches. Only shapes, buffers and launches here;
`mol.ops.kernels.decode` says what runs.

Shape suffixes: N rows (S * B of shared blocks, then B * k of routed ones), B tokens, D = d_model,
M width of a block, F its inner width, H heads, d head width, V vocabulary, P partial sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mol.model.attention import SoftmaxAttention
from mol.model.step_inside import inside
from mol.model.step_tiles import TILE, Rows, depth, grid, power, tiled, warps
from mol.ops.attention import Rope
from mol.ops.tracing import untraced

# Beyond these, rows of one matrix should share its reads through matrix products. For a stage:
# rows, and bytes of matrices that its routed rows read, each by itself. From MoL 2.08B on one H200
# (24 layers, 11 MB a routed block, three of 14 a token): 0.92 ms a token at batch 1 and 5.19 at 8
# are 8.5 us a layer for each routed row and 13 for the rest. Sharing takes 2.32 ms at 8, 97 us a
# layer: at an estimated 3.5 us for each of the 1 + 14 (1 - (11 / 14)^B) blocks that B tokens read,
# 52 for the rest. So at batch 2 it takes 74 us instead of 64, at 3 80 instead of 89, and the limit
# lies between 66 and 99 MB. Measured since: 1.60 ms at batch 2, each row by itself, and 1.99 at 4.
MOST_ROWS = 32
MOST_READ = 80e6
MOST_TOKENS = 4  # at full width, where the longest product reads its weights once a token
MOST_WIDTH = 4096  # of what a program holds whole, in a tile of 4096 x 16
DEEPEST = 2048  # rows of a tile where one program adds up a whole column


def takes_stage(stage: nn.Module, x_BD: Tensor) -> bool:
    """Whether `stage_step` can run this split stage on `x_BD`."""
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits_stage(stage, x_BD)


def takes_layer(layer: nn.Module, x_BD: Tensor) -> bool:
    """Whether `dense_step` can run this full-width layer (with a dense FFN) on `x_BD`."""
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits_layer(layer, x_BD)


def fits_stage(stage: nn.Module, x_BD: Tensor) -> bool:
    """What `takes_stage` asks on any device: kinds of parts, precision and sizes."""
    config, (batch, width) = stage.config, x_BD.shape
    rows = batch * (config.n_shared + _slots(stage))
    weights = sum(w.numel() for w in stage.routed.parameters()) // config.n_routed
    read = batch * _slots(stage) * weights * x_BD.element_size()
    return (
        _has_kernels(stage, x_BD)
        and rows <= MOST_ROWS
        and (read <= MOST_READ or not _can_share(x_BD))
        and max(config.d_thin, width // 8, config.d_ff // 4) <= MOST_WIDTH
    )


def shares_reads(stage: nn.Module, x_BD: Tensor) -> bool:
    """Whether each part of `SplitStage.plain_step` on `x_BD` is a kernel or a product."""
    on_kernels = x_BD.is_cuda and not torch.is_grad_enabled() and _can_share(x_BD)
    return on_kernels and _has_kernels(stage, x_BD)


def _can_share(x_BD: Tensor) -> bool:
    """Grouped products in fp32 read the offsets on the host."""
    return x_BD.element_size() == 2


def _has_kernels(stage: nn.Module, x_BD: Tensor) -> bool:
    config = stage.config
    known = config.rank1 is None and config.router in ("linear", "none")
    return known and _one_precision(stage, x_BD)


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
class _FullWidth:
    """A full-width layer under the names of `ThinBlocks`; with biases its norms are LayerNorm."""

    attention: nn.Module
    attention_norm: Tensor
    ffn_norm: Tensor
    ffn_in: Tensor
    attention_norm_bias: Tensor | None
    ffn_norm_bias: Tensor | None
    eps: float


@untraced
def stage_step(
    stage: nn.Module, x_BD: Tensor, rope: Rope, position: int | Tensor, cache: Any
) -> Tensor:
    """`SplitStage.step`, [B, D]; changes `cache` (a `StageCache`)."""
    from mol.ops.kernels import decode
    from mol.ops.kernels.decode_parts import launch

    config, routed, x_BD = stage.config, stage.routed, x_BD.contiguous()
    shared = stage.shared or routed
    (batch, width), thin, slots = x_BD.shape, config.d_thin, _slots(stage)
    block = torch.empty(batch * slots, dtype=torch.int32, device=x_BD.device)
    rows = Rows(batch, config.n_shared, slots, block)
    weight = rows.new(batch * slots)
    tiling, experts = tiled(depth(width, 8, least=DEEPEST // 4)), power(config.n_routed)
    splits = -(-width // tiling["DEEP"])
    h_PNM = rows.new(splits, rows.count, thin)
    router = routed.down if stage.router is None else stage.router  # not read without router
    launch(
        decode.down, grid(rows.groups, thin, tiling, splits),
        x_BD, router, shared.down, routed.down, block, weight, h_PNM, h_PNM.stride(0),
        **rows.sizes, SLOTS=slots, BLOCKS=config.n_routed, EXPERTS=experts, TOP_K=config.top_k,
        ROUTER=stage.router is not None, ALL=stage.full,
        RENORMALIZE=config.weights_over == "selected",
        CHUNK=min(power(width), max(16, TILE // experts)), D=width, M=thin, **tiling,
    )  # fmt: skip
    sums_NM, f_NF = inside(
        rows, stage.shared, routed, h_PNM, rope, position, cache.shared, cache.routed
    )
    tiling = tiled(depth(config.d_ff, 4))
    splits = -(-config.d_ff // tiling["DEEP"])
    parts_PNM = rows.new(splits, rows.count, thin)
    launch(
        decode.ffn_out, grid(rows.groups, thin, tiling, splits),
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
    rows = Rows(x_BD.shape[0], int(softmax), int(not softmax), block)
    full = _FullWidth(
        layer.attention, first.weight, second.weight, layer.ffn.w_in,
        getattr(first, "bias", None), getattr(second, "bias", None), first.eps,
    )  # fmt: skip
    pairs = (full, None, cache, None) if softmax else (None, full, None, cache)
    shared, routed, *caches = pairs
    sums_ND, f_NF = inside(rows, shared, routed, x_BD[None], rope, position, *caches)
    out, whole = layer.ffn.w_out, Rows(rows.batch, 1, 0, block)
    return _up(whole, x_BD, sums_ND, f_NF, None, None, out, out, (1.0, 1.0))


def _up(
    rows: Rows,
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
    from mol.ops.kernels.decode_parts import launch

    (batch, out), width = x_BD.shape, values_NK.shape[1]
    y_BD, columns = torch.empty_like(x_BD), 16
    deep = [min(DEEPEST, power(max(1, n) * width)) for n in (rows.shared, rows.slots)]
    n_parts, stride = (0, 0) if parts_PNK is None else (parts_PNK.shape[0], parts_PNK.stride(0))
    launch(
        decode.up, (batch, -(-out // columns)),
        x_BD, values_NK if added_ND is None else added_ND, values_NK,
        values_NK if parts_PNK is None else parts_PNK, stride, rows.block,
        values_NK if weight is None else weight, w_shared, w_routed, y_BD, *scales,
        **rows.sizes, SLOTS=rows.slots, K=width, M=out, PARTS=n_parts, ADD=added_ND is not None,
        DEEP_SHARED=deep[0], DEEP_ROUTED=deep[1], COLUMNS=columns,
        num_warps=warps(max(deep) * columns),
    )  # fmt: skip
    return y_BD


def takes_head(norm: nn.Module, x_BD: Tensor, embedding_VD: Tensor) -> bool:
    """Whether `head_step` can run the product with the embedding, and the final norm before it."""
    fits = _one_precision(norm, x_BD) and embedding_VD.dtype == x_BD.dtype
    few = x_BD.shape[0] <= MOST_TOKENS and x_BD.shape[1] <= MOST_WIDTH
    return x_BD.is_cuda and not torch.is_grad_enabled() and fits and few


@untraced
def head_step(norm: nn.Module | None, x_BD: Tensor, embedding_VD: Tensor) -> Tensor:
    """Logits [B, V] of norm(x), one launch; without a norm, of an x that has been through it."""
    from mol.ops.kernels import decode
    from mol.ops.kernels.decode_parts import launch

    x_BD = x_BD.contiguous()
    batch, (vocabulary, width) = x_BD.shape[0], embedding_VD.shape
    y_BV = x_BD.new_empty(batch, vocabulary)
    weight, bias = getattr(norm, "weight", x_BD), getattr(norm, "bias", None)
    lines = max(1, min(16, TILE // power(width)))
    launch(
        decode.logits, (-(-vocabulary // lines),),
        x_BD, weight, weight if bias is None else bias, embedding_VD, y_BV,
        0.0 if norm is None else norm.eps,
        B=batch, K=width, M=vocabulary, NORM=norm is not None, LAYER=bias is not None,
        DEEP=power(width), LINES=lines, num_warps=warps(lines * power(width)),
    )  # fmt: skip
    return y_BV
