"""Chunked linear cross-entropy against all logits at once."""

import pytest
import torch

from mol.ops import cross_entropy
from mol.ops.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    weighted_cross_entropy,
)


def case(rows, vocabulary, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 7, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 7, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    return hidden, weight, targets, upstream


@pytest.mark.parametrize("rows", [1, 5, 37])
@pytest.mark.parametrize("at_once", [1, 40, 1 << 25])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients(rows, at_once, dtype, tolerance, monkeypatch):
    monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", at_once)
    hidden, weight, targets, upstream = case(rows, 11, dtype)
    nll = linear_cross_entropy(hidden, weight, targets)
    assert nll.dtype == dtype and nll.shape == (rows,)
    expected = linear_cross_entropy_reference(hidden, weight, targets)
    assert (nll - expected).norm() <= tolerance * expected.norm()
    loss = weighted_cross_entropy(hidden, weight, targets, upstream)
    expected_loss = (expected * upstream.to(dtype)).sum()
    found = (loss, *torch.autograd.grad(3 * loss, [hidden, weight]))
    wanted = (expected_loss, *torch.autograd.grad(3 * expected_loss, [hidden, weight]))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine - theirs).norm() <= tolerance * theirs.norm().clamp(min=1)


def test_extreme_logits_stay_exact():
    hidden = torch.tensor([[1000.0], [-1000.0]])
    weight = torch.tensor([[1.0], [-1.0]])
    nll = linear_cross_entropy(hidden, weight, torch.tensor([0, 0]))
    assert nll.tolist() == [0.0, 2000.0]


def test_memory_is_bounded(monkeypatch):
    """No tensor of all logits is made, in either pass."""
    monkeypatch.setitem(cross_entropy.LOGITS_AT_ONCE, "cpu", 300)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **kwargs or {})
            for tensor in output if isinstance(output, tuple | list) else [output]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return output

    hidden, weight, targets, _ = case(64, 100)
    with Watch():
        weighted_cross_entropy(hidden, weight, targets, torch.ones(64)).backward()
    assert largest <= 700  # the weight, 100 x 7; all logits would be 6,400


def test_bf16_weights_and_autocast():
    hidden, weight, targets, _ = case(16, 11, torch.float32)
    exact = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_cross_entropy(hidden, weight, targets)
        loss = weighted_cross_entropy(hidden, weight, targets, torch.full((16,), 1 / 16))
    assert cast.dtype == torch.float32
    assert 0 < (cast - exact).abs().max() < 0.1
    torch.testing.assert_close(loss, cast.mean())
    loss.backward()
    mean = linear_cross_entropy_reference(hidden, weight, targets).mean()
    for grad, exact_grad in zip(
        (hidden.grad, weight.grad), torch.autograd.grad(mean, [hidden, weight]), strict=True
    ):
        assert grad.dtype == torch.float32
        assert 0 < (grad - exact_grad).norm() < 0.02 * exact_grad.norm()
