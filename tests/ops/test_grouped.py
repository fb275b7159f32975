"""Grouped products against the loop over groups."""

import pytest
import torch

from mol.ops import grouped
from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import gathered_mm, grouped_mm, grouped_mm_reference

GROUPS = {
    "empty groups": [0, 5, 1, 0, 12, 0],
    "one row": [0, 1],
    "one group": [7],
    "equal": [4, 4, 4],
}


def operands(sizes, width_in, width_out, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), width_in, generator=generator).to(dtype)
    w = torch.randn(len(sizes), width_in, width_out, generator=generator).to(dtype)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return x.requires_grad_(), w.requires_grad_(), offs


def loop(x, w, sizes):
    """Independent of the reference: row by row, in fp64."""
    blocks = torch.repeat_interleave(torch.tensor(sizes))
    return torch.stack([row.double() @ w[b].double() for row, b in zip(x, blocks, strict=True)])


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("widths", [(8, 16), (8, 13), (7, 8), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=str,
)
def test_products_and_gradients(sizes, widths, dtype, tolerance):
    x, w, offs = operands(sizes, *widths, dtype)
    expected = loop(x, w, sizes)
    functions = [lambda: grouped_mm(x, w, offs), lambda: grouped_mm_reference(x, w, offs)]
    if len(set(sizes)) == 1:
        functions.append(lambda: grouped_mm(x, w, offs, equal=True))
    upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected).to(dtype)
    plain = torch.autograd.grad((expected * upstream).sum(), [x, w])
    for function in functions:
        y = function()
        assert y.dtype == dtype
        grads = torch.autograd.grad((y * upstream).sum(), [x, w])
        for found, want in zip((y, *grads), (expected, *plain), strict=True):
            error = (found.double() - want.double()).norm() / want.double().norm()
            assert error < tolerance


def test_misaligned_views():
    """Operands whose memory is transposed or sliced give the same product."""
    x, w, offs = operands([3, 0, 6], 8, 16, torch.float32)
    wide = torch.cat([x.detach(), x.detach()], 1)[:, :8]
    turned = w.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.allclose(grouped_mm(wide, turned, offs), grouped_mm(x, w, offs), atol=1e-6)


def test_autocast_takes_its_dtype():
    x, w, offs = operands([3, 5], 8, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_mm(x, w, offs)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


@pytest.mark.parametrize("blocks", [1, 3])
def test_equal_groups_as_on_cuda(blocks, monkeypatch):
    """Sums with an addend in one product, and blocks that share the tokens' one copy."""
    plan = RoutePlan.full(blocks, 2, 4, torch.device("cpu"))
    x, w, offs = operands([8] * blocks, 8, 16, torch.float64)
    add = torch.randn(8 * blocks, 16, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def results():
        summed = grouped_mm(x, w, offs, equal=True, add_NM=add)
        shared = gathered_mm(tokens, w, plan)
        toward = torch.linspace(-1, 1, add.numel(), dtype=torch.float64).view_as(add)
        loss = ((summed + 2 * shared) * toward).sum()
        return [summed, shared, *torch.autograd.grad(loss, [x, w, add, tokens])]

    expected = results()
    monkeypatch.setattr(grouped, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(grouped, "_product", None if blocks > 1 else grouped._product)
    for found, want in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, want)
