"""The dense-product rank-1 mixture against the gather written from the equation."""

import pytest
import torch

from mol.model.config import Rank1FFN
from mol.model.rank1 import Rank1Mixture, reference_rank1


def mixture(stack=None, d=12, **options) -> Rank1Mixture:
    torch.manual_seed(0)
    config = Rank1FFN(**({"n_experts": 20, "top_k": 5, "routing_dim": 6} | options))
    built = Rank1Mixture(d, config, stack).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    return built


def with_gradients(function, x, parameters):
    x = x.clone().requires_grad_()
    y = function(x)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return y, torch.autograd.grad(loss, [x, *parameters])


@pytest.mark.parametrize("cosine", ["mean", "first"])
@pytest.mark.parametrize("se_hidden", [None, 4])
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_equals_the_gather_with_all_gradients(cosine, se_hidden, top_k):
    built = mixture(cosine=cosine, se_hidden=se_hidden, top_k=top_k)
    x = torch.randn(17, 12, dtype=torch.float64)
    parameters = list(built.parameters())
    y, grads = with_gradients(built, x, parameters)
    y_ref, grads_ref = with_gradients(lambda x: reference_rank1(built, x), x, parameters)
    torch.testing.assert_close(y, y_ref, atol=1e-12, rtol=1e-12)
    for grad, expected in zip(grads, grads_ref, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-12)
    if top_k > 1:  # a single expert's weight is 1 whatever its cosine
        assert all(g.abs().max() > 0 for g in grads)


@pytest.mark.parametrize("se_hidden", [None, 3])
def test_a_stack_is_independent_mixtures(se_hidden):
    stacked = mixture(stack=3, se_hidden=se_hidden)
    x = torch.randn(3, 11, 12, dtype=torch.float64)
    y, grads = with_gradients(stacked, x, list(stacked.parameters()))
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    for e in range(3):
        single = mixture(se_hidden=se_hidden)
        single.load_state_dict({k: v[e] for k, v in stacked.state_dict().items()})
        x_e = x[e].clone().requires_grad_()
        y_e = reference_rank1(single, x_e)
        torch.testing.assert_close(y[e], y_e, atol=1e-12, rtol=1e-12)
        expected = torch.autograd.grad((y_e * weights[e]).sum(), [x_e, *single.parameters()])
        for grad, grad_e in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad[e], grad_e, atol=1e-12, rtol=1e-12)


def test_leading_dimensions_are_tokens():
    built = mixture()
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    assert torch.equal(built(x).view(6, 12), built(x.view(6, 12)))


def test_routing_sees_directions_only():
    built = mixture()
    x = torch.randn(9, 12, dtype=torch.float64)
    before = built.cosines(x)
    with torch.no_grad():
        built.routing.mul_(torch.rand(20, 2, 1, dtype=torch.float64) + 0.5)
    torch.testing.assert_close(built.cosines(3 * x), before, atol=1e-12, rtol=0)
    assert before.abs().max() <= 1


def test_the_gate_holds_896_weights_in_8_layers():
    config = Rank1FFN(n_experts=16, top_k=12, routing_dim=4, se_hidden=4)
    gate = Rank1Mixture(8, config).gate
    assert 8 * sum(p.numel() for p in gate.parameters()) == 896


def test_bf16_autocast_selects_the_experts_of_fp32():
    built = mixture(n_experts=256, top_k=12).float()
    x = torch.randn(64, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = built(x)
        chosen = built.cosines(x).topk(12).indices
    assert low.dtype == torch.bfloat16
    assert torch.equal(chosen, built.cosines(x).topk(12).indices)
    full = built(x)
    assert (low.float() - full).norm() < 0.02 * full.norm()
