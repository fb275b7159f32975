"""Gather and weighted sum by tokens against the route plan's in fp64, every gradient."""

import pytest
import torch

pytest.importorskip("triton")

from mol.ops.dispatch import RoutePlan
from mol.ops.kernels.combine import combine, gather

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that a kernel leaves unwritten holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def framed(*shape, dtype):
    """Random values with a NaN before and many behind them."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 5008,), float("nan"), dtype=dtype, device=DEVICE)
    memory[8 : 8 + size] = torch.randn(size)
    return memory[8 : 8 + size].view(shape).requires_grad_()


def routes(batch, length, slots, n_blocks):
    """Block 1 gets no row where tokens can do without it."""
    odds = torch.rand(batch, length, n_blocks)
    if n_blocks > slots:
        odds[..., 1] = -1
    return RoutePlan.routed(odds.topk(slots).indices.to(DEVICE), n_blocks)


def check(found, expected, leaves, plain_leaves):
    """Outputs and gradients: one rounding, by truncation at worst, beside fp32 sums' error."""
    loss = torch.randn(found.shape, device=DEVICE).to(found.dtype)
    gradients = torch.autograd.grad(found, leaves, loss)
    plain = torch.autograd.grad(expected, plain_leaves, loss.double())
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert gradient.dtype == leaf.dtype
    for a, b in zip((found, *gradients), (expected, *plain), strict=True):
        ulp = torch.finfo(a.dtype).eps
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, rtol=ulp, atol=max(1e-6, ulp / 8) * scale)


def double(t):
    return t.detach().double().requires_grad_()


# (sequences, positions, slots, blocks, width, dtype of the rows, dtype of the residual): few
# tokens in narrow programs, a token a program, several narrow tokens a program.
CASES = {
    "one token": (1, 1, 3, 14, 70, BF16, BF16),
    "few tokens, long rows": (5, 1, 3, 6, 2100, BF16, BF16),
    "one block": (1, 3, 1, 1, 16, FP32, FP32),
    "narrow rows": (3, 61, 2, 5, 40, FP32, FP32),
    "a row of one": (1, 131, 3, 7, 1, FP16, FP16),
    "fp32 residual": (1, 135, 3, 14, 272, BF16, FP32),
    "wide rows": (2, 65, 2, 4, 2056, BF16, BF16),
    "all blocks": (1, 20, 5, 5, 24, FP32, FP32),
}


@pytest.mark.parametrize("name", CASES)
def test_combine_and_its_gradients(name):
    batch, length, slots, n_blocks, width, dtype, residual = CASES[name]
    plan = routes(batch, length, slots, n_blocks)
    tokens = batch * length
    y_ND = framed(tokens * slots, width, dtype=dtype)
    weights_Xk = framed(tokens, slots, dtype=FP32)
    base_XD = framed(tokens, width, dtype=residual)
    shared_XD = framed(tokens, width, dtype=dtype)
    leaves = [y_ND, weights_Xk, base_XD, shared_XD]
    found = combine(y_ND, plan.inverse_N, *leaves[1:], 0.25, 0.5, plan.slots)
    assert found.dtype == residual
    plain = y, weights, base, shared = [double(t) for t in leaves]
    expected = base + 0.25 * shared + 0.5 * plan.combine(y, weights)
    check(found, expected, leaves, plain)


@pytest.mark.parametrize("tokens", [2, 140])
@pytest.mark.parametrize("absent", ["weights", "base", "shared", "base and shared", "all but base"])
def test_absent_operands(absent, tokens):
    plan, width = routes(1, tokens, 2, 4), 36
    y_ND = framed(tokens * 2, width, dtype=FP32)
    shapes = {"weights": 2, "base": width, "shared": width}
    present = {
        name: framed(tokens, size, dtype=FP32)
        for name, size in shapes.items()
        if (name == "base" if absent == "all but base" else name not in absent)
    }
    operands = [present.get(name) for name in shapes]
    found = combine(y_ND, plan.inverse_N, *operands, 1.0, 0.5, plan.slots)
    plain_y_ND, plain = double(y_ND), {name: double(t) for name, t in present.items()}
    expected = 0.5 * plan.combine(plain_y_ND, plain.get("weights"))
    for name in ("base", "shared"):
        if name in plain:
            expected = expected + plain[name]
    check(found, expected, [y_ND, *present.values()], [plain_y_ND, *plain.values()])


def test_gradient_of_the_residual_is_passed_on():
    plan = routes(1, 3, 2, 4)
    y_ND, base_XD = framed(6, 8, dtype=FP32), framed(3, 8, dtype=FP32)
    out_XD = combine(y_ND, plan.inverse_N, None, base_XD, None, 1.0, 1.0, plan.slots)
    loss = torch.randn(3, 8, device=DEVICE)
    (gradient,) = torch.autograd.grad(out_XD, base_XD, loss)
    assert gradient.data_ptr() == loss.data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_gather_and_its_gradient(name):
    batch, length, slots, n_blocks, width, dtype, _ = CASES[name]
    plan = routes(batch, length, slots, n_blocks)
    x_XD = framed(batch * length, width, dtype=dtype)
    found = gather(x_XD, plan.inverse_N, slots)
    assert torch.equal(found, x_XD[plan.order_N // slots])
    plain_x_XD = double(x_XD)
    check(found, plan.gather(plain_x_XD), [x_XD], [plain_x_XD])


def test_operands_with_gaps_between_rows():
    plan, width = routes(1, 5, 2, 4), 12
    wide_ND = framed(10, 2 * width, dtype=FP32)
    wide_XD = framed(5, 2 * width, dtype=FP32)
    y_ND, x_XD = wide_ND[:, :width], wide_XD[:, width:]
    found = combine(y_ND, plan.inverse_N, None, x_XD, None, 1.0, 1.0, plan.slots)
    torch.testing.assert_close(found, x_XD + plan.combine(y_ND))
    rows_ND = gather(x_XD, plan.inverse_N, 2)
    assert torch.equal(rows_ND, x_XD[plan.order_N // 2])


def test_operators_as_a_compiler_sees_them():
    plan = routes(1, 3, 2, 4)
    y_ND, base_XD = framed(6, 8, dtype=FP32), framed(3, 8, dtype=FP32)
    weights_Xk = framed(3, 2, dtype=FP32)
    operator = torch.ops.mol.combine.default
    rest = (plan.inverse_N, weights_Xk, base_XD, base_XD.detach(), 0.5, 0.25, 2)
    torch.library.opcheck(operator, (y_ND, *rest))
    torch.library.opcheck(operator, (y_ND, plan.inverse_N, None, None, None, 1.0, 1.0, 2))
    torch.library.opcheck(torch.ops.mol.gather.default, (base_XD, plan.inverse_N, 2))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes 13 GiB and a million programs")
def test_more_elements_than_a_32_bit_number_counts():
    """The last rows lie beyond 2^31 elements."""
    tokens, width = 2**20 + 3, 2056
    x_XD = torch.zeros(tokens, width, dtype=BF16, device=DEVICE)
    x_XD[-3:] = torch.randn(3, width, device=DEVICE).to(BF16)
    inverse_N = torch.arange(tokens, device=DEVICE)
    rows_ND = gather(x_XD, inverse_N, 1)
    assert torch.equal(rows_ND, x_XD)
    weights_Xk = torch.full((tokens, 1), 2.0, device=DEVICE)
    out_XD = combine(rows_ND, inverse_N, weights_Xk, x_XD, None, 1.0, 1.0, 1)
    torch.testing.assert_close(out_XD[-3:].float(), 3 * x_XD[-3:].float(), rtol=2**-8, atol=0)
