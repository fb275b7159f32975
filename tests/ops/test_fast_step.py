"""The fused decode step against `plain_step` of the same layer: outputs, and what caches hold."""

import copy

import pytest
import torch
from small_models import SMALL
from torch import Tensor, nn

from mol.model import fast_step, step_inside, step_tiles
from mol.model.attention import KVCache
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.delta import DeltaCache
from mol.model.split_stage import SplitStage, StageCache
from mol.model.transformer import FullWidthLayer, LanguageModel
from mol.ops.attention import Rope

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
D_MODEL, ROOM = 24, 9
# Sums in another order, about ten products in a row; in bf16 the reference also rounds between
# any two operations, 2^-9 each time.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


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


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small caches and matrices have several parts, splits, tiles and chunks."""
    monkeypatch.setattr(step_inside, "CACHE_TILE", 32)
    for module in (step_tiles, fast_step):
        monkeypatch.setattr(module, "TILE", 1024)
    monkeypatch.setattr(fast_step, "DEEPEST", 64)
    torch.manual_seed(0)


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


@torch.no_grad()
def check(layer: nn.Module, batch: int, dtype: torch.dtype, position: list) -> None:
    """One step at each position, on caches that are full after the last."""
    stage = isinstance(layer, SplitStage)
    step = fast_step.stage_step if stage else fast_step.dense_step
    attention = layer.routed.attention if stage else layer.attention
    rope = Rope(attention.out.shape[-1] // attention.n_heads)
    cache = filled(layer.new_cache(batch, ROOM), free=len(position))
    other = poisoned(cache)
    for time in position:
        x_BD = torch.randn(batch, D_MODEL).to(DEVICE, dtype)
        expected = layer.plain_step(x_BD, rope, time, cache)
        found = step(layer, x_BD, rope, time, other)
        assert found.dtype == dtype
        # x itself would hide errors of the update.
        compare(found - x_BD, expected - x_BD, TOLERANCES[dtype])
        for mine, reference in zip(tensors(other), tensors(cache), strict=True):
            compare(mine, reference, TOLERANCES[dtype])


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage(kind):
    config, batch = STAGES[kind]
    stage = built(SplitStage(config, D_MODEL), torch.float32)
    each = torch.tensor([ROOM - 1, 2], device=DEVICE)  # sequences of unlike length
    check(stage, batch, torch.float32, [each if batch == 2 else ROOM - 1])


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_steps_in_a_row_at_a_position_on_the_device(attention):
    stage = built(SplitStage(split(attention=attention), D_MODEL), torch.float32)
    times = [torch.tensor([t], device=DEVICE) for t in (ROOM - 2, ROOM - 1)]
    check(stage, 1, torch.float32, times)


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_a_stage_in_bf16(attention):
    stage = built(SplitStage(split(attention=attention), D_MODEL), torch.bfloat16)
    check(stage, 1, torch.bfloat16, [ROOM - 1])


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_a_full_width_layer(attention, norm):
    dense = DenseLayer(n_heads=2, d_ff=70, attention=attention)
    config = ModelConfig(vocab_size=50, d_model=D_MODEL, n_layers=1, layer=dense, norm=norm)
    layer = built(FullWidthLayer(config, dense), torch.float32)
    check(layer, 2, torch.float32, [ROOM - 1])


@torch.no_grad()
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_the_head(norm):
    norm, embedding = built(norm(D_MODEL, eps=1e-5), torch.float32), torch.randn(53, D_MODEL)
    x_BD, embedding = torch.randn(2, D_MODEL, device=DEVICE), embedding.to(DEVICE)
    found = fast_step.head_step(norm, x_BD, embedding)
    compare(found, norm(x_BD) @ embedding.T, 1e-5)


def test_a_full_cache_is_refused():
    stage = built(SplitStage(split(), D_MODEL), torch.float32)
    cache = stage.new_cache(1, ROOM)
    with pytest.raises(ValueError, match="larger max_len"):
        fast_step.stage_step(stage, torch.randn(1, D_MODEL, device=DEVICE), Rope(6), ROOM, cache)


def test_what_is_left_to_the_reference():
    x_BD, stage = torch.zeros(3, D_MODEL), SplitStage(split(), D_MODEL)
    assert fast_step.fits_stage(stage, x_BD)
    assert not fast_step.fits_stage(stage, x_BD.double())
    assert not fast_step.fits_stage(stage, x_BD.bfloat16())
    assert not fast_step.fits_stage(stage, x_BD.repeat(5, 1))
    rank1 = {"n_experts": 12, "top_k": 3, "routing_dim": 6}
    assert not fast_step.fits_stage(SplitStage(split(d_ff=None, rank1=rank1), D_MODEL), x_BD)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast_step.fits_stage(stage, x_BD)
    with torch.no_grad():
        assert fast_step.takes_stage(stage, x_BD) == x_BD.is_cuda


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deltanet_1p2of5", "dense"])
def test_a_model_goes_on_after_its_prompt(kind, monkeypatch):
    """Prefill fills the caches that the fused steps continue, as on CUDA."""
    monkeypatch.setattr(fast_step, "takes_stage", fast_step.fits_stage)
    monkeypatch.setattr(fast_step, "takes_layer", fast_step.fits_layer)
    config = SMALL[kind].model_copy(update={"init_std": 0.3, "n_layers": 2})
    model, ids_BT = LanguageModel(config).to(DEVICE), torch.randint(50, (2, 6), device=DEVICE)
    whole_BTV = model.logits(model(ids_BT).hidden)
    cache = model.new_cache(2, 6)
    model(ids_BT[:, :4], cache)
    for time in (4, 5):
        compare(model.step(ids_BT[:, time], cache), whole_BTV[:, time], 1e-4)
