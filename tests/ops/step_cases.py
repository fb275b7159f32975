"""What the tests of decode steps share: stages of every kind, caches, the comparison."""

import copy

import torch
from torch import Tensor, nn

from mol.model.attention import KVCache
from mol.model.config import SplitLayer
from mol.model.delta import DeltaCache
from mol.model.split_stage import StageCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
D_MODEL, ROOM = 24, 9


def split(**changes) -> SplitLayer:
    base = {"d_thin": 12, "n_heads": 2, "n_blocks": 6, "n_shared": 1, "top_k": 2, "d_ff": 20}
    return SplitLayer(**base | {"attention": "deltanet"} | changes)


STAGES = {
    "hybrid": (split(), 2),
    "softmax": (split(attention="softmax"), 2),
    "no shared, k = 1": (split(n_shared=0, top_k=1), 3),
    "no shared, softmax": (split(n_shared=0, attention="softmax", divide_by_k=False), 1),
    "two shared, k = 3": (split(n_shared=2, top_k=3, attention="softmax"), 1),
    "k = 4 of 5": (split(top_k=4), 1),
    "full coverage": (split(coverage="full", attention="softmax", weights_over="all"), 1),
    "uniform": (split(router="none", top_k=5), 1),
    "unit": (split(shared_weight="unit", weights_over="all"), 1),
    "one head of 40": (split(d_thin=40, n_heads=1, d_ff=70), 1),
    "one block": (split(n_blocks=1, n_shared=0, top_k=1, router="none", coverage="full"), 2),
}


def built(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Random in all weights: unit norms or zero biases would hide a wrong block."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            offset = 1.0 if "norm" in name and "bias" not in name else 0.0
            weight.copy_(offset + 0.3 * torch.randn(weight.shape))
    return module.to(DEVICE, dtype)


def filled(cache, free: int):
    """As after unlike numbers of rows a segment, at least `free` below what fits."""
    if isinstance(cache, StageCache):
        return StageCache(cache.shared and filled(cache.shared, free), filled(cache.routed, free))
    if isinstance(cache, DeltaCache):
        cache.tail_SJC.normal_()
        cache.state_SHdd.normal_()
        return cache
    cache.used_S.random_(ROOM - free + 1)
    cache.used_S[0] = ROOM - free
    for held in (cache.keys_SHLd, cache.values_SHLd):
        held.normal_().masked_fill_(unused(cache), 0)  # the reference multiplies them by 0
    return cache


def unused(cache: KVCache) -> Tensor:
    line = torch.arange(cache.keys_SHLd.shape[2], device=DEVICE)
    return (line >= cache.used_S[:, None])[:, None, :, None]


def poisoned(cache):
    """A copy with NaN where nothing is held."""
    if isinstance(cache, StageCache):
        return StageCache(cache.shared and poisoned(cache.shared), poisoned(cache.routed))
    cache = copy.deepcopy(cache)
    if isinstance(cache, KVCache):
        for held in (cache.keys_SHLd, cache.values_SHLd):
            held.masked_fill_(unused(cache), torch.nan)
    return cache


def tensors(cache) -> list[Tensor]:
    """What two caches must agree on: of keys and values the rows in use, zeros for the others."""
    if isinstance(cache, StageCache):
        return [t for kind in (cache.shared, cache.routed) if kind for t in tensors(kind)]
    if isinstance(cache, DeltaCache):
        return [cache.tail_SJC, cache.state_SHdd]
    both = (cache.keys_SHLd, cache.values_SHLd)
    return [cache.used_S.double(), *(held.masked_fill(unused(cache), 0) for held in both)]


def compare(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error, scale = (found.double() - expected.double()).norm(), expected.double().norm()
    assert error <= tolerance * scale, f"relative error {error / scale:.2e}"
