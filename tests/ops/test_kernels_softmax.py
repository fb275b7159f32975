"""The loss kernel against PyTorch in fp64: losses, and the gradient over the logits."""

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCES

pytest.importorskip("triton")

from mol.ops.kernels import softmax

pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.mark.parametrize("rows, width, vocabulary", [(1, 8, 5), (7, 64, 64), (3, 4160, 4111)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_the_gradient_of_what_counts(rows, width, vocabulary, dtype):
    logits = (3 * torch.randn(rows, width, dtype=torch.float64)).to(DEVICE, dtype)
    logits[:, vocabulary:] = float("nan")  # beyond the vocabulary nothing is read
    targets = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    targets[-1] = vocabulary - 1
    share = torch.rand(rows, device=DEVICE)
    counted = logits[:, :vocabulary].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(counted, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * share.double()).sum(), [counted])

    kept = logits.clone()
    alone = softmax.losses_in_place(kept, targets, None, vocabulary)
    assert torch.equal(kept.nan_to_num(7), logits.nan_to_num(7)), "without shares nothing changes"
    losses = softmax.losses_in_place(logits, targets, share, vocabulary)
    assert torch.equal(losses, alone) and losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert logits[:, vocabulary:].eq(0).all()
    difference = logits[:, :vocabulary].double() - expected_grad
    assert difference.norm() <= TOLERANCES[dtype] * expected_grad.norm()


def test_extreme_and_broken_logits():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, float("nan"), 1.0]], device=DEVICE)
    targets = torch.tensor([1, 0], device=DEVICE)
    losses = softmax.losses_in_place(logits, targets, None, 3)
    assert losses[0] == 2e4 and losses[1].isnan()
