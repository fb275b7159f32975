"""The whole language model: against a plain forward pass, and properties of every kind of layer."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import SMALL

from mol.model.config import ModelConfig
from mol.model.transformer import LanguageModel

ROUTED = {"moe_ffn", "high_rank", "top3", "sparse", "softmax_1p2of5", "deltanet_1p2of5"}
SPLIT_ROUTED = {"top3", "sparse", "softmax_1p2of5", "deltanet_1p2of5"}


def built(kind: str, init_std: float = 0.3, seed: int = 5) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(SMALL[kind].model_copy(update={"init_std": init_std}))


def token_ids(batch=2, length=13) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(7))


def loss_of(model: LanguageModel, ids_BT: torch.Tensor) -> torch.Tensor:
    output = model(ids_BT[:, :-1])
    logits = model.logits(output.hidden)
    return F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten()) + 0.05 * output.balance


def plain_dense_forward(model: LanguageModel, ids_T: list[int]) -> torch.Tensor:
    """Logits [T, V] of the dense softmax model, one sequence, from the definitions."""
    p = {name: tensor.detach() for name, tensor in model.named_parameters()}
    layer = model.config.layer
    heads = layer.n_heads

    def rms(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(x, t):  # x [d]: pair (i, i + d/2) turns by t * base^(-2i/d)
        half = len(x) // 2
        turned = x.clone()
        for i in range(half):
            angle = t * model.config.rope_base ** (-2 * i / len(x))
            c, s = math.cos(angle), math.sin(angle)
            turned[i] = c * x[i] - s * x[i + half]
            turned[i + half] = s * x[i] + c * x[i + half]
        return turned

    x = p["embedding.weight"][ids_T]
    for n in range(model.config.n_layers):
        w = {k.removeprefix(f"layers.{n}."): v for k, v in p.items()}
        h = rms(x, w["attention_norm.weight"])
        q, k, v = (h @ w["attention.qkv"] + w["attention.qkv_bias"]).chunk(3, -1)
        mixed = torch.zeros_like(x)
        d = x.shape[-1] // heads
        for head in range(heads):
            cut = slice(head * d, (head + 1) * d)
            for t in range(len(ids_T)):
                turned = rotate(q[t, cut], t)
                scores = torch.stack([turned @ rotate(k[s, cut], s) for s in range(t + 1)])
                mixed[t, cut] = torch.softmax(scores / d**0.5, 0) @ v[: t + 1, cut]
        x = x + mixed @ w["attention.out"] + w["attention.out_bias"]
        h = rms(x, w["ffn_norm.weight"])
        x = x + F.gelu(h @ w["ffn.w_in"], approximate="tanh") @ w["ffn.w_out"]
    return rms(x, p["norm.weight"]) @ p["embedding.weight"].T


def test_dense_model_equals_the_definitions():
    model = built("dense").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        ids = token_ids(1, 9)
        logits = model.logits(model(ids).hidden)[0]
    expected = plain_dense_forward(model, ids[0].tolist())
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", SMALL)
def test_every_weight_learns(kind):
    model = built(kind)
    loss_of(model, token_ids(4, 17)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", SMALL)
def test_loss_falls(kind):
    model = built(kind, init_std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = token_ids(4, 17)
    losses = []
    for _ in range(15):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@torch.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_a_token_sees_neither_the_future_nor_other_sequences(kind):
    model = built(kind).double()
    ids = token_ids(3, 12)
    before = model(ids).hidden
    later = ids.clone()
    later[:, 8:] = (later[:, 8:] + 1) % 50
    after = model(later).hidden
    torch.testing.assert_close(after[:, :8], before[:, :8], atol=1e-12, rtol=0)
    assert (after[:, 8:] - before[:, 8:]).abs().max() > 1e-3
    alone = model(ids[1:2]).hidden
    torch.testing.assert_close(alone, before[1:2], atol=1e-12, rtol=0)
    first = ids.clone()
    first[:, 0] = (first[:, 0] + 1) % 50
    assert (model(first).hidden[:, 1:] - before[:, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", SMALL)
def test_balance_and_routes(kind):
    model, ids = built(kind), token_ids()
    output = model(ids)
    assert output.balance.shape == () and (output.balance > 0).item() == (kind in ROUTED)
    layer = model.config.layer
    assert len(output.routes) == (model.config.n_layers if kind in SPLIT_ROUTED else 0)
    for route_BTk in output.routes:
        assert route_BTk.shape == (*ids.shape, layer.top_k)
        assert 0 <= route_BTk.min() and route_BTk.max() < layer.n_routed
        assert all(len(set(row)) == layer.top_k for row in route_BTk.flatten(0, 1).tolist())


def test_balance_is_the_mean_over_layers():
    model = built("sparse").double()
    ids = token_ids()
    x = model.embedding(ids)
    expected = []
    for layer, rope in zip(model.layers, model._ropes, strict=True):
        mean = torch.softmax(x.flatten(0, 1) @ layer.router.T, -1).mean(0)
        expected.append(mean.var(correction=0) / mean.mean() ** 2)
        x = layer(x, rope)[0]
    torch.testing.assert_close(model(ids).balance, sum(expected) / 3, atol=1e-12, rtol=1e-12)
    with torch.no_grad():
        assert model(ids).balance.item() == 0  # nobody can train on it


@pytest.mark.parametrize("kind", SMALL)
def test_recomputed_activations_change_nothing(kind):
    ids = token_ids()
    grads = []
    for recompute in (False, True):
        model = built(kind)
        model.checkpoint_activations = recompute
        loss_of(model, ids).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", SMALL)
def test_bf16_autocast_is_near_fp32(kind):
    model, ids = built(kind, init_std=0.1), token_ids(4, 17)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = loss_of(model, ids)
    low.backward()
    assert all(
        p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters()
    )
    assert abs(low.item() - loss_of(model, ids).item()) < 0.02


@pytest.mark.parametrize("kind", SMALL)
def test_every_weight_is_drawn_and_only_from_the_seed(kind):
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    try:
        one, two = built(kind), built(kind)
    finally:
        torch.use_deterministic_algorithms(False)
    other = built(kind, seed=6)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert a.isfinite().all() and torch.equal(a, b), name
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


def test_initial_spread():
    config = ModelConfig(
        vocab_size=200,
        d_model=128,
        n_layers=8,
        layer={"kind": "dense", "n_heads": 2, "d_ff": 256},
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all()
        elif "bias" in name:
            assert (p == 0).all()
        else:
            residual = name.endswith((".out", "w_out"))
            expected = 0.02 / 4 if residual else 0.02  # sqrt(2 L) = 4
            assert abs(p.std().item() / expected - 1) < 0.03, name


@pytest.mark.parametrize("kind", SMALL)
def test_the_meta_device_builds_the_same_shapes(kind):
    with torch.device("meta"):
        abstract = LanguageModel(SMALL[kind])
    shapes = {name: p.shape for name, p in built(kind).named_parameters()}
    assert {name: p.shape for name, p in abstract.named_parameters()} == shapes
    assert all(p.is_meta for p in abstract.parameters())


def test_state_is_weights_alone_and_loads_back():
    one, two = built("deltanet_1p2of5"), built("deltanet_1p2of5", seed=9)
    assert set(one.state_dict()) == {name for name, _ in one.named_parameters()}
    two.load_state_dict(one.state_dict())
    ids = token_ids()
    assert torch.equal(one(ids).hidden, two(ids).hidden)


def test_layers_with_one_head_width_share_their_rotary_table():
    assert len({id(rope) for rope in built("sparse")._ropes}) == 1
