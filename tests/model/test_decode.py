"""One token at a time gives what the whole sequence gives, for every kind of layer."""

import pytest
import torch
from small_models import SMALL

from mol.model.transformer import LanguageModel

BATCH, LENGTH = 3, 11


def built(kind: str) -> tuple[LanguageModel, torch.Tensor]:
    torch.manual_seed(3)
    # Wide weights, so that layers differ enough for a wrong cache to show.
    model = LanguageModel(SMALL[kind].model_copy(update={"init_std": 0.4})).double()
    return model, torch.randint(0, 50, (BATCH, LENGTH))


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_decode_equals_the_whole_sequence(kind):
    model, ids_BT = built(kind)
    whole_BTV = model.logits(model(ids_BT).hidden)
    cache = model.new_cache(BATCH, LENGTH)
    for t in range(LENGTH):
        logits_BV = model.step(ids_BT[:, t], cache)
        torch.testing.assert_close(logits_BV, whole_BTV[:, t], atol=1e-10, rtol=1e-10)
    assert cache.position == LENGTH


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 2, 7])
@pytest.mark.parametrize("kind", SMALL)
def test_a_prompt_fills_the_cache(kind, prompt):
    model, ids_BT = built(kind)
    whole_BTV = model.logits(model(ids_BT).hidden)
    cache = model.new_cache(BATCH, LENGTH)
    hidden_BTD = model(ids_BT[:, :prompt], cache).hidden
    torch.testing.assert_close(
        model.logits(hidden_BTD), whole_BTV[:, :prompt], atol=1e-10, rtol=1e-10
    )
    for t in range(prompt, LENGTH):
        logits_BV = model.step(ids_BT[:, t], cache)
        torch.testing.assert_close(logits_BV, whole_BTV[:, t], atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(4, 9), (1, 2, 3), (2, 3, 7)])
@pytest.mark.parametrize("kind", SMALL)
def test_a_used_cache_is_continued_by_several_tokens(kind, cuts):
    """Pieces of one to five tokens, around the convolution's reach; then steps again."""
    model, ids_BT = built(kind)
    whole_BTV = model.logits(model(ids_BT).hidden)
    cache = model.new_cache(BATCH, LENGTH)
    for first, last in zip((0, *cuts[:-1]), cuts, strict=True):
        hidden_BTD = model(ids_BT[:, first:last], cache).hidden
        torch.testing.assert_close(
            model.logits(hidden_BTD), whole_BTV[:, first:last], atol=1e-10, rtol=1e-10
        )
    for t in range(cuts[-1], LENGTH):
        logits_BV = model.step(ids_BT[:, t], cache)
        torch.testing.assert_close(logits_BV, whole_BTV[:, t], atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_branches_of_a_cache_go_on_alone(kind):
    model, ids_BT = built(kind)
    trunk = model.new_cache(BATCH, LENGTH)
    model(ids_BT[:, :5], trunk)
    parent = torch.tensor([2, 0, 0, 2])
    more = torch.randint(0, 50, (4, 3))
    branched = trunk.branch(parent)
    found_BTD = model(more, branched).hidden
    whole_BTD = model(torch.cat([ids_BT[parent, :5], more], 1)).hidden
    torch.testing.assert_close(found_BTD, whole_BTD[:, 5:], atol=1e-10, rtol=1e-10)
    # The trunk is as it was: its own continuation does not see the branches.
    rest_BTD = model(ids_BT[:, 5:], trunk).hidden
    torch.testing.assert_close(rest_BTD, model(ids_BT).hidden[:, 5:], atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_a_position_on_the_device_gives_the_same_steps(kind):
    """As a CUDA graph replays them: no host number says how much the cache holds."""
    model, ids_BT = built(kind)
    on_host, on_device = model.new_cache(BATCH, LENGTH), model.new_cache(BATCH, LENGTH)
    on_device.position = position = torch.zeros(1, dtype=torch.int64)
    for t in range(LENGTH):
        expected_BV = model.step(ids_BT[:, t], on_host)
        found_BV = model.step(ids_BT[:, t], on_device)
        torch.testing.assert_close(found_BV, expected_BV, atol=1e-12, rtol=1e-12)
        assert on_device.position is position and position.item() == t + 1


@torch.no_grad()
def test_two_caches_do_not_mix():
    model, ids_BT = built("deltanet_1p2of5")
    one, two = model.new_cache(BATCH, LENGTH), model.new_cache(BATCH, LENGTH)
    alone = model.new_cache(BATCH, LENGTH)
    expected = [model.step(ids_BT[:, t], alone) for t in range(LENGTH)]
    for t in range(LENGTH):
        assert torch.equal(model.step(ids_BT[:, t], one), expected[t])
        model.step(ids_BT[:, -1 - t], two)


def test_a_full_cache_is_refused():
    model, ids_BT = built("dense")
    cache = model.new_cache(BATCH, 2)
    with pytest.raises(ValueError, match="0 of 2"):
        model(ids_BT, cache)
    model.step(ids_BT[:, 0], cache)
    with pytest.raises(ValueError, match="1 of 2"):
        model(ids_BT[:, :2], cache)
    model.step(ids_BT[:, 1], cache)
    with pytest.raises(ValueError, match="larger max_len"):
        model.step(ids_BT[:, 2], cache)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "deltanet_1p2of5", "ct_moe", "high_rank"])
def test_decode_in_bf16(kind):
    model, ids_BT = built(kind)
    whole_BTV = model.logits(model(ids_BT).hidden)
    low = model.bfloat16()
    cache = low.new_cache(BATCH, LENGTH)
    for t in range(LENGTH):
        logits_BV = low.step(ids_BT[:, t], cache)
        assert logits_BV.dtype == torch.bfloat16 and logits_BV.isfinite().all()
    whole_low = low.logits(low(ids_BT).hidden)
    assert (whole_low - whole_BTV).norm() < 0.2 * whole_BTV.norm()
