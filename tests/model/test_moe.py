"""Routed FFN experts against a loop over experts, at full width."""

import pytest
import torch

from mol.model.high_rank import HighRankMoE
from mol.model.moe_ffn import RoutedFFN, reference_routed

KINDS = {
    "moe_ffn": lambda: RoutedFFN(12, n_experts=5, top_k=3, d_ff=8),
    "one_active": lambda: RoutedFFN(12, n_experts=5, top_k=1, d_ff=8),
    "all_active": lambda: RoutedFFN(12, n_experts=4, top_k=4, d_ff=6),
    "more_experts_than_rows": lambda: RoutedFFN(12, n_experts=64, top_k=2, d_ff=4),
    "high_rank": lambda: HighRankMoE(12, n_experts=9, top_k=4, rank=7),
}


def built(kind: str):
    torch.manual_seed(1)
    ffn = KINDS[kind]().double()
    for name, parameter in ffn.named_parameters():
        torch.nn.init.normal_(parameter, mean=3.0 if name == "temperature" else 0.0)
    return ffn


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop_with_all_gradients(kind):
    ffn = built(kind)
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    inputs = [x, *ffn.parameters()]
    weights = torch.randn(2, 7, 12, dtype=torch.float64)
    y, _ = ffn(x)
    y_ref = reference_routed(ffn, x.reshape(-1, 12)).view_as(x)
    torch.testing.assert_close(y, y_ref, atol=1e-12, rtol=1e-12)
    grads = torch.autograd.grad((y * weights).sum(), inputs)
    expected = torch.autograd.grad((y_ref * weights).sum(), inputs)
    for grad, grad_ref in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, grad_ref, atol=1e-12, rtol=1e-12)


def test_balance_is_the_variance_over_the_squared_mean():
    ffn = built("moe_ffn")
    x = torch.randn(1, 50, 12, dtype=torch.float64)
    _, balance = ffn(x)
    mean = torch.softmax(x[0] @ ffn.router.T, -1).mean(0)
    expected = ((mean - mean.mean()) ** 2).mean() / mean.mean() ** 2
    torch.testing.assert_close(balance, expected, atol=1e-12, rtol=1e-12)


def test_balance_is_zero_for_even_routing_and_grows_when_one_expert_takes_all():
    ffn = built("moe_ffn")
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    with torch.no_grad():
        ffn.router.zero_()
        assert ffn(x)[1] == 0
        ffn.router[2] = 1e3 * x[0].mean(0)
        assert ffn(x)[1] > 1


def test_the_score_of_an_anchor_is_its_direction_times_the_temperature():
    ffn = built("high_rank")
    x = torch.randn(6, 12, dtype=torch.float64)
    scores = ffn.scores(x)
    assert scores.abs().max() <= ffn.temperature.abs()
    with torch.no_grad():
        ffn.router.mul_(7.0)
        torch.testing.assert_close(ffn.scores(0.1 * x), scores, atol=1e-12, rtol=0)
        ffn.temperature.mul_(2.0)
        torch.testing.assert_close(ffn.scores(x), 2 * scores, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["moe_ffn", "high_rank"])
def test_bf16_autocast_routes_as_fp32_does(kind):
    ffn = built(kind).float()
    x = torch.randn(1, 40, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, balance = ffn(x)
        scores = ffn.scores(x[0])
    assert low.dtype == torch.bfloat16
    assert torch.equal(scores, ffn.scores(x[0])) and balance.dtype == torch.float32
    full, _ = ffn(x)
    assert (low - full).norm() < 0.03 * full.norm()
