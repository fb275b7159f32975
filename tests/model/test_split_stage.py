"""The one-pass split stage against the loop over blocks: outputs, every gradient, decoding."""

import itertools

import pytest
import torch

from mol.model import fast_step
from mol.model.config import Rank1FFN, SplitLayer
from mol.model.reference import reference_balance, reference_stage
from mol.model.split_stage import SplitStage
from mol.ops.attention import Rope

D_MODEL = 20
ROPE = Rope(6)
RANK1 = Rank1FFN(n_experts=9, top_k=4, routing_dim=5, se_hidden=3)


def stage_of(dtype=torch.float64, seed=0, **overrides) -> SplitStage:
    """A small stage whose weights are large enough for every term to show in the output."""
    settings = dict(d_thin=12, n_heads=2, n_blocks=6, n_shared=1, top_k=2, d_ff=17)
    if "rank1" in overrides:
        settings.pop("d_ff")
    torch.manual_seed(seed)
    stage = SplitStage(SplitLayer(**settings | overrides), D_MODEL)
    stage.init_weights(std=0.3, residual_std=0.3)
    with torch.no_grad():
        for name, weight in stage.named_parameters():
            if name.endswith(("bias", "norm")):  # constants at the start would hide a mix-up
                weight.add_(0.3 * torch.randn_like(weight))
    return stage.to(dtype)


def tokens(batch, length, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, D_MODEL, generator=generator, dtype=torch.float64).to(dtype)


def gradients(stage, x, function):
    """Output and the gradients of the input and of every parameter under one fixed loss."""
    x = x.clone().requires_grad_()
    y = function(x)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    names, parameters = zip(*stage.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * weights).sum(), [x, *parameters], allow_unused=True)
    return dict(zip(["y", "x", *names], [y.detach(), *grads], strict=True))


def assert_same(fast, plain, tolerance):
    for name, expected in plain.items():
        found = fast[name]
        if expected is None or found is None:
            assert found is None or not found.any(), name
            assert expected is None or not expected.any(), name
            continue
        error = (found - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= tolerance or (found - expected).norm() <= tolerance, (name, error.item())


def check(stage, batch, length, tolerance=1e-12):
    x = tokens(batch, length, stage.routed.down.dtype)
    fast = gradients(stage, x, lambda x: stage(x, ROPE)[0])
    plain = gradients(stage, x, lambda x: reference_stage(stage, x, ROPE))
    assert plain["routed.down"].any()
    assert_same(fast, plain, tolerance)


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
@pytest.mark.parametrize("coverage", ["full", "routed"])
@pytest.mark.parametrize("batch, length", [(1, 1), (3, 1), (1, 37), (2, 5)])
def test_equals_the_loop(attention, coverage, batch, length):
    check(stage_of(attention=attention, coverage=coverage), batch, length)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("coverage", ["full", "routed"])
def test_every_k(top_k, coverage):
    check(stage_of(top_k=top_k, coverage=coverage, attention="deltanet"), 2, 9)


@pytest.mark.parametrize("n_shared", [0, 1, 2])
@pytest.mark.parametrize("router, top_k", [("linear", 2), ("none", None)])
def test_every_option_of_equation_2(n_shared, router, top_k):
    options = itertools.product(["selected", "all"], [True, False], ["in_mean", "unit"])
    for weights_over, divide_by_k, shared_weight in options:
        stage = stage_of(
            n_shared=n_shared,
            router=router,
            top_k=top_k or 6 - n_shared,
            weights_over=weights_over,
            divide_by_k=divide_by_k,
            shared_weight=shared_weight,
        )
        check(stage, 2, 4)


@pytest.mark.parametrize("router", ["bias", "every_block"])
@pytest.mark.parametrize("coverage", ["full", "routed"])
@pytest.mark.parametrize("weights_over", ["selected", "all"])
def test_other_routers(router, coverage, weights_over):
    changes = {"router": router, "coverage": coverage, "weights_over": weights_over}
    stage = stage_of(**changes, attention="deltanet", n_shared=2)
    check(stage, 2, 9)
    x = tokens(2, 9)
    one, other = (
        gradients(stage, x, lambda x, f=f: f(stage, x))
        for f in (lambda stage, x: stage(x, ROPE)[1], reference_balance)
    )
    assert_same(one, other, 1e-12)
    assert one["router"].any() and (router != "bias" or one["router_bias"].any())
    assert not fast_step.fits_stage(stage.float(), x[:, 0].float())  # whose kernel knows neither


def test_what_another_router_changes():
    """Scores of the shared blocks take weight from the routed ones, unless the chosen share all
    of it among themselves; the choice is the same."""
    for weights_over, same in (("selected", True), ("all", False)):
        linear = stage_of(weights_over=weights_over)
        every = stage_of(weights_over=weights_over, router="every_block")
        every.load_state_dict(linear.state_dict() | {"router": every.router})
        with torch.no_grad():
            every.router[: len(linear.router)] = linear.router
        x = tokens(2, 9)
        (y, balance, routes), (y_every, balance_every, routes_every) = (
            stage(x, ROPE) for stage in (linear, every)
        )
        assert torch.equal(routes, routes_every) and not torch.isclose(balance, balance_every)
        assert torch.allclose(y, y_every) == same
    with pytest.raises(ValueError, match="needs shared blocks"):
        stage_of(router="every_block", n_shared=0)


def test_options_differ():
    """The loop above would agree with itself if an option were ignored by both."""
    x, outputs = tokens(2, 4), []
    for weights_over, divide_by_k, shared_weight in itertools.product(
        ["selected", "all"], [True, False], ["in_mean", "unit"]
    ):
        stage = stage_of(
            weights_over=weights_over, divide_by_k=divide_by_k, shared_weight=shared_weight
        )
        outputs.append(stage(x, ROPE)[0])
    distinct = {tuple(y.flatten()[:3].tolist()) for y in outputs}
    assert len(distinct) == 6  # without divide_by_k the two shared weights agree


@pytest.mark.parametrize("coverage, router, top_k", [("full", "none", 5), ("routed", "linear", 2)])
def test_rank_1_blocks(coverage, router, top_k):
    stage = stage_of(rank1=RANK1, coverage=coverage, router=router, top_k=top_k)
    check(stage, 2, 7)


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_one_routed_block(attention):
    """3.3: K = 1 without a router; and a router with a single candidate."""
    alone = dict(n_blocks=1, n_shared=0, top_k=1, router="none", coverage="full")
    check(stage_of(attention=attention, **alone), 2, 7)
    stage = stage_of(attention=attention, n_blocks=2, top_k=1)
    check(stage, 2, 7)
    assert stage(tokens(2, 7), ROPE)[1] == 0


def test_blocks_without_tokens():
    stage = stage_of(attention="deltanet", n_blocks=9)
    with torch.no_grad():
        stage.router[0] = stage.router[3] = 0
        stage.router[:] = stage.router[:1]  # equal scores: ties go to the same two blocks
    x = tokens(2, 5)
    routes = stage(x, ROPE)[2]
    assert routes.unique().numel() == 2
    check(stage, 2, 5)


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_fp32(attention):
    check(stage_of(torch.float32, attention=attention), 2, 37, tolerance=3e-5)


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
@pytest.mark.parametrize("coverage", ["full", "routed"])
def test_causal(attention, coverage):
    """A later token changes nothing before it."""
    stage, x = stage_of(attention=attention, coverage=coverage), tokens(2, 12)
    changed = x.clone()
    changed[:, 7:] += 1
    before, after = stage(x, ROPE)[0], stage(changed, ROPE)[0]
    assert torch.allclose(before[:, :7], after[:, :7], rtol=0, atol=1e-13)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_sequences_do_not_mix(attention):
    stage, x = stage_of(attention=attention), tokens(3, 11)
    together = stage(x, ROPE)[0]
    alone = torch.cat([stage(row[None], ROPE)[0] for row in x])
    assert (together - alone).abs().max() < 1e-13


def test_coverage_matters_only_when_blocks_miss_tokens():
    x = tokens(2, 9)
    full, routed = (stage_of(coverage=c)(x, ROPE)[0] for c in ("full", "routed"))
    assert (full - routed).abs().max() > 1e-3
    full, routed = (stage_of(coverage=c, top_k=5)(x, ROPE)[0] for c in ("full", "routed"))
    assert (full - routed).abs().max() < 1e-13


@pytest.mark.parametrize("n_shared", [0, 1])
def test_sparse_equals_dense_restricted(n_shared):
    """2.3: gathering a block's tokens equals masking its attention to them."""
    stage, x = stage_of(n_shared=n_shared), tokens(2, 23)
    sparse = stage(x, ROPE)[0]
    dense = reference_stage(stage, x, ROPE, dense_restricted=True)
    assert (sparse - dense).abs().max() < 1e-12


def test_balance_and_routes():
    stage, x = stage_of(), tokens(3, 8)
    y, balance, routes = stage(x, ROPE)
    expected = reference_balance(stage, x)
    assert torch.allclose(balance, expected, rtol=1e-12)
    found, plain = (torch.autograd.grad(b, stage.router)[0] for b in (balance, expected))
    assert torch.allclose(found, plain, rtol=1e-10, atol=1e-15)
    scores = x @ stage.router.t()
    assert routes.shape == (3, 8, 2)
    assert torch.equal(routes.sort(-1).values, scores.topk(2).indices.sort(-1).values)


def test_no_router():
    _, balance, routes = stage_of(router="none", top_k=5)(tokens(1, 3), ROPE)
    assert balance.item() == 0 and balance.dim() == 0 and routes is None


STEPPED = [
    dict(attention="softmax", coverage="routed"),
    dict(attention="softmax", coverage="full"),
    dict(attention="deltanet", coverage="routed"),
    dict(attention="deltanet", coverage="full"),
    dict(attention="softmax", coverage="routed", n_shared=0, top_k=1),
    dict(attention="deltanet", coverage="routed", router="every_block", weights_over="all"),
    dict(rank1=RANK1, coverage="full", router="none", top_k=5),
    dict(rank1=RANK1, coverage="routed", attention="deltanet"),
]


@pytest.mark.parametrize("overrides", STEPPED, ids=lambda o: "-".join(map(str, o.values()))[:40])
@pytest.mark.parametrize("prompt", [0, 1, 6])
@torch.no_grad()
def test_decode_equals_prefill(overrides, prompt):
    """Token by token, from nothing or after a prompt; the shared cache starts poisoned."""
    stage, x = stage_of(**overrides), tokens(3, 13)
    expected = stage(x, ROPE)[0]
    cache = stage.new_cache(3, 16)
    if cache.shared is not None:
        cache.shared.keys_SHLd.fill_(torch.nan)
        cache.shared.values_SHLd.fill_(torch.nan)
    if prompt:
        assert torch.equal(stage(x[:, :prompt], ROPE, cache)[0], stage(x[:, :prompt], ROPE)[0])
    for position in range(prompt, 13):
        y = stage.step(x[:, position], ROPE, position, cache)
        assert (y - expected[:, position]).abs().max() < 1e-10, position


def test_full_cache_is_refused():
    stage, x = stage_of(), tokens(1, 1)
    cache = stage.new_cache(1, 1)
    stage.step(x[:, 0], ROPE, 0, cache)
    with pytest.raises(ValueError, match="2 tokens do not fit .* larger max_len"):
        stage.step(x[:, 0], ROPE, 1, cache)
    with pytest.raises(ValueError, match="3 tokens do not fit .* larger max_len"):
        stage(tokens(1, 3), ROPE, stage.new_cache(1, 2))


def thin_count(big_d, d, f, heads, deltanet):
    """Weights of one thin block, from the shapes the paper gives."""
    delta = 5 * d * d + 2 * d * heads + 12 * d + d // heads + 2 * heads
    attention = delta if deltanet else 4 * d * d + 4 * d
    return 2 * big_d * d + attention + 2 * d + 2 * d * f


@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
@pytest.mark.parametrize("router", ["linear", "bias", "every_block", "none"])
def test_parameter_count(attention, router):
    config = SplitLayer(
        d_thin=256,
        n_heads=4,
        n_blocks=15,
        n_shared=1,
        top_k=14 if router == "none" else 3,
        attention=attention,
        router=router,
        d_ff=1024,
    )
    with torch.device("meta"):
        stage = SplitStage(config, 1024)
    shared = thin_count(1024, 256, 1024, 4, False)
    routed = thin_count(1024, 256, 1024, 4, attention == "deltanet")
    scores = {"none": 0, "linear": 14 * 1024, "bias": 14 * 1025, "every_block": 15 * 1024}
    expected = shared + 14 * routed + scores[router]
    assert sum(p.numel() for p in stage.parameters()) == expected
    assert stage.inactive_parameters() == (0 if router == "none" else 11 * routed)
