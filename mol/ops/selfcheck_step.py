"""Prompts and decode steps as a machine runs them without gradients, for `selfcheck`: against the
same layers in fp64, which no kernel takes, and for steps against the layers' modules.

Shape suffixes: B sequences, D width of the model.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mol.model.attention import KVCache
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.delta import DeltaCache
from mol.model.fast_step import MOST_ROWS
from mol.model.split_stage import SplitStage, StageCache
from mol.model.transformer import FullWidthLayer
from mol.ops.attention import Rope

# Sequences of each check, and the rows that each segment may hold before: many sequences are too
# many for the fused step (three rows each), so that rows share the reads of a block's matrices.
FEW, MANY = (3, 700), (MOST_ROWS // 3 + 1, 40)
D_MODEL, STEPS = 96, 3
BATCH, PROMPT, MORE = 3, 250, 5  # a block has more rows of a sequence than a chunk of 64
SPLIT = {"d_thin": 128, "n_heads": 2, "n_blocks": 6, "n_shared": 1, "top_k": 2, "d_ff": 93}


def decode_steps(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, fast, plain), which return outputs of three steps and what they change in caches."""
    dense = DenseLayer(n_heads=1, d_ff=93)
    config = ModelConfig(vocab_size=50, d_model=D_MODEL, n_layers=1, layer=dense)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {
            "hybrid stage": SplitStage(SplitLayer(**SPLIT, attention="deltanet"), D_MODEL),
            "softmax stage": SplitStage(SplitLayer(**SPLIT), D_MODEL),
            "full-width layer": FullWidthLayer(config, dense),
        }
        for name, layer in layers.items():
            layer.init_weights(std=0.1, residual_std=0.1)
            layer = layer.to(device=device, dtype=dtype)
            sizes = {"": FEW}
            if isinstance(layer, SplitStage):
                sizes[", many sequences"] = MANY
            for suffix, (batch, held) in sizes.items():
                cache = _filled(layer.new_cache(batch, held + STEPS), held)
                x = torch.randn(STEPS, batch, D_MODEL).to(device=device, dtype=dtype)
                fast = _run(layer, "step", x, cache, held, dtype)
                plain = _run(layer, "plain_step", x, cache, held, torch.float64)
                yield f"decode step, {name}{suffix}", fast, plain


def prompts(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, fast, plain), which return outputs of a prompt and of what follows it, and caches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for attention in ("deltanet", "softmax"):
            stage = SplitStage(SplitLayer(**SPLIT, attention=attention), D_MODEL)
            stage.init_weights(std=0.1, residual_std=0.1)
            for name, weight in stage.named_parameters():
                if "norm" in name:  # not ones, so that another block's would be seen
                    nn.init.normal_(weight, 1, 0.5)
            stage = stage.to(device=device, dtype=dtype)
            x_BTD = torch.randn(BATCH, PROMPT + MORE, D_MODEL).to(device=device, dtype=dtype)
            runs = (_prompted(stage, x_BTD, kind) for kind in (dtype, torch.float64))
            yield f"prompt without gradients, {attention}", *runs


def _prompted(
    stage: SplitStage, x_BTD: Tensor, dtype: torch.dtype
) -> Callable[[], dict[str, Tensor]]:
    stage, x_BTD = copy.deepcopy(stage).to(dtype), x_BTD.to(dtype)
    rope = Rope(stage.config.d_thin // stage.config.n_heads)

    @torch.no_grad()
    def run() -> dict[str, Tensor]:
        cache = stage.new_cache(BATCH, PROMPT + MORE)
        first_BTD, more_BTD = x_BTD.split([PROMPT, MORE], 1)
        results = {
            "prompt": stage(first_BTD, rope, cache)[0] - first_BTD,
            "after it": stage(more_BTD, rope, cache, PROMPT)[0] - more_BTD,
        }
        for number, part in enumerate(_parts(cache)):
            held = {f"{name}, {number}": tensor.double() for name, tensor in vars(part).items()}
            results |= held
        return results

    return run


def _run(
    layer: nn.Module, step: str, x_CBD: Tensor, cache, position: int, dtype: torch.dtype
) -> Callable[[], dict[str, Tensor]]:
    """Steps of the method `step` on a copy of `cache`, the first one at `position`."""
    layer, cache = copy.deepcopy(layer).to(dtype), _copied(cache, dtype)
    head = layer.routed.attention if isinstance(layer, SplitStage) else layer.attention
    rope = Rope(head.out.shape[-1] // head.n_heads)

    @torch.no_grad()
    def run() -> dict[str, Tensor]:
        results, held = {}, copy.deepcopy(cache)
        for number, x_BD in enumerate(x_CBD.to(dtype)):
            # x itself would hide errors of the much smaller update.
            y_BD = getattr(layer, step)(x_BD, rope, position + number, held)
            results[f"output {number}"] = y_BD - x_BD
        for number, (part, before) in enumerate(zip(_parts(held), _parts(cache), strict=True)):
            for name, tensor in vars(part).items():
                # Not what was held before: a wrong row among 700 right ones would pass.
                change = tensor.double() - vars(before)[name].double()
                results[f"change of {name}, {number}"] = change
        return results

    return run


def _parts(cache) -> list[KVCache | DeltaCache]:
    if isinstance(cache, StageCache):
        return [part for part in (cache.shared, cache.routed) if part is not None]
    return [cache]


def _filled(cache, most: int):
    """As after unlike numbers of rows a segment, the first with the most."""
    for part in _parts(cache):
        if isinstance(part, DeltaCache):
            drawn = part.tail_SJC, part.state_SHdd
        else:
            drawn = part.keys_SHLd, part.values_SHLd
            part.used_S.copy_(torch.randint(0, most + 1, part.used_S.shape))
            part.used_S[0] = most
        for held in drawn:
            held.copy_(torch.randn(held.shape))
    return cache


def _copied(cache, dtype: torch.dtype):
    """In `dtype`; states are fp32 at least."""
    cache = copy.deepcopy(cache)
    for part in _parts(cache):
        for name, held in vars(part).items():
            if held.is_floating_point():
                wide = name == "state_SHdd"
                kept = torch.promote_types(dtype, torch.float32) if wide else dtype
                setattr(part, name, held.to(kept))
    return cache
