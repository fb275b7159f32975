"""The kernel of bias and rotary positions against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, compare, route_plan

pytest.importorskip("triton")

from mol.ops.attention import Rope
from mol.ops.kernels.rope import bias_rope, bias_rope_reference

pytestmark = pytest.mark.usefixtures("nan_memory")


def operands(plan, blocks, heads, width):
    rows, columns = plan.order_N.numel(), 3 * heads * width
    wide = torch.randn(rows, columns + 16, dtype=torch.float64)
    bias = torch.randn(blocks, columns, dtype=torch.float64)
    tables = Rope(width).tables(plan.length, DEVICE, torch.float32)
    return [wide[:, :columns], bias], (*tables, plan.time_N, plan.offs_E)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    "rows, weights",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_bias_rope(case, rows, weights):
    *route, heads, width = case
    plan = route_plan(*route)
    inputs, rest = operands(plan, route[2], heads, width)
    found = compare(bias_rope, bias_rope_reference, inputs, [rows, weights], *rest)
    assert [t.dtype for t in found] == [rows] * 4 + [weights]


def test_reference_is_the_model_own_path():
    plan = route_plan(2, 11, 3, 2)
    (qkv, bias), rest = operands(plan, 3, 2, 8)
    shifted = (qkv + plan.expand(bias)).view(-1, 3, 2, 8)
    q, k, v = shifted.to(DEVICE).unbind(1)
    rope = Rope(8)
    wanted = (*(rope(t, plan.time_N, plan.length) for t in (q, k)), v)
    found = bias_rope_reference(qkv.to(DEVICE), bias.to(DEVICE), *rest)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # its tables are fp32


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    inputs, rest = operands(plan, 2, 1, 8)
    inputs = [t.float().to(DEVICE).contiguous().requires_grad_() for t in inputs]
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(bias_rope, (*inputs, *rest), test_utils=checks)
