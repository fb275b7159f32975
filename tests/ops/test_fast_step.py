"""The fused decode step against `plain_step` of the same layer: outputs, and what caches hold."""

import pytest
import torch
from small_models import SMALL
from step_cases import (
    D_MODEL,
    DEVICE,
    ROOM,
    STAGES,
    built,
    compare,
    filled,
    poisoned,
    split,
    tensors,
)
from torch import nn

from mol.model import fast_step, step_inside, step_tiles
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.split_stage import SplitStage
from mol.model.transformer import FullWidthLayer, LanguageModel
from mol.ops.attention import Rope

pytest.importorskip("triton")
# Sums in another order, about ten products in a row; in bf16 the reference also rounds between
# any two operations, 2^-9 each time.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small caches and matrices have several parts, splits, tiles and chunks."""
    monkeypatch.setattr(step_inside, "CACHE_TILE", 32)
    for module in (step_tiles, fast_step):
        monkeypatch.setattr(module, "TILE", 1024)
    monkeypatch.setattr(fast_step, "DEEPEST", 64)
    torch.manual_seed(0)


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
    compare(fast_step.head_step(None, x_BD, embedding), x_BD @ embedding.T, 1e-5)


def test_a_full_cache_is_refused():
    stage = built(SplitStage(split(), D_MODEL), torch.float32)
    cache = stage.new_cache(1, ROOM)
    with pytest.raises(ValueError, match="larger max_len"):
        fast_step.stage_step(stage, torch.randn(1, D_MODEL, device=DEVICE), Rope(6), ROOM, cache)


def test_many_sequences_share_their_reads():
    """By the bytes of MoL 2.08B: fused up to two tokens, as far as rows of a block can share."""
    layer = SplitLayer(
        d_thin=512, n_heads=8, n_blocks=15, n_shared=1, top_k=3, d_ff=2048, attention="deltanet"
    )
    with torch.device("meta"):
        stage = SplitStage(layer, 2048)
    for dtype, most in ((torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 8)):
        x_BD, stage = torch.zeros(11, 2048, dtype=dtype), stage.to(dtype)
        assert [fast_step.fits_stage(stage, x_BD[:n]) for n in range(1, 12)].count(True) == most
        assert fast_step.fits_stage(stage, x_BD[:most])


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
        # Kernels for many rows: in 16 bits, as fp32's grouped products read on the host.
        assert not fast_step.shares_reads(stage, x_BD)
        low_BD = x_BD.bfloat16().repeat(5, 1)
        assert fast_step.shares_reads(stage.bfloat16(), low_BD) == x_BD.is_cuda
        assert stage.steps_in_kernels(low_BD) == x_BD.is_cuda
        assert not fast_step.shares_reads(stage, low_BD.half())


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
    hidden_BTD = model(ids_BT[:, :4], cache).hidden
    monkeypatch.setattr(fast_step, "takes_head", lambda *operands: True)
    compare(model.logits(hidden_BTD[:, -1]), whole_BTV[:, 3], 1e-4)
    for time in (4, 5):
        compare(model.step(ids_BT[:, time], cache), whole_BTV[:, time], 1e-4)
