"""The decode step that a machine takes against the layers' modules in fp64, for `selfcheck`.

Shape suffixes: B sequences, D width of the model.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mol.model.attention import KVCache
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.delta import DeltaCache
from mol.model.split_stage import SplitStage, StageCache
from mol.model.transformer import FullWidthLayer
from mol.ops.attention import Rope

BATCH, D_MODEL, HELD, STEPS = 3, 96, 700, 3


def decode_steps(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, fast, plain), which return outputs of three steps and what they change in caches."""
    split = {"d_thin": 128, "n_heads": 2, "n_blocks": 6, "n_shared": 1, "top_k": 2, "d_ff": 93}
    dense = DenseLayer(n_heads=1, d_ff=93)
    config = ModelConfig(vocab_size=50, d_model=D_MODEL, n_layers=1, layer=dense)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {
            "hybrid stage": SplitStage(SplitLayer(**split, attention="deltanet"), D_MODEL),
            "softmax stage": SplitStage(SplitLayer(**split), D_MODEL),
            "full-width layer": FullWidthLayer(config, dense),
        }
        for name, layer in layers.items():
            layer.init_weights(std=0.1, residual_std=0.1)
            layer = layer.to(device=device, dtype=dtype)
            cache = _filled(layer.new_cache(BATCH, HELD + STEPS))
            x = torch.randn(STEPS, BATCH, D_MODEL).to(device=device, dtype=dtype)
            fast = _run(layer, "step", x, cache, dtype)
            plain = _run(layer, "plain_step", x, cache, torch.float64)
            yield f"decode step, {name}", fast, plain


def _run(
    layer: nn.Module, step: str, x_CBD: Tensor, cache, dtype: torch.dtype
) -> Callable[[], dict[str, Tensor]]:
    layer, cache = copy.deepcopy(layer).to(dtype), _copied(cache, dtype)
    head = layer.routed.attention if isinstance(layer, SplitStage) else layer.attention
    rope = Rope(head.out.shape[-1] // head.n_heads)

    @torch.no_grad()
    def run() -> dict[str, Tensor]:
        results, held = {}, copy.deepcopy(cache)
        for number, x_BD in enumerate(x_CBD.to(dtype)):
            # x itself would hide errors of the much smaller update.
            y_BD = getattr(layer, step)(x_BD, rope, HELD + number, held)
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


def _filled(cache):
    """As after unlike numbers of rows a segment, the first as many as fit before the steps."""
    for part in _parts(cache):
        if isinstance(part, DeltaCache):
            drawn = part.tail_SJC, part.state_SHdd
        else:
            drawn = part.keys_SHLd, part.values_SHLd
            part.used_S.copy_(torch.randint(0, HELD + 1, part.used_S.shape))
            part.used_S[0] = HELD
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
