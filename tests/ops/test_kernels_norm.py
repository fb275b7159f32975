"""RMSNorm kernels against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, SEVERAL_TILES, compare, route_plan

pytest.importorskip("triton")

from mol.ops import glue
from mol.ops.kernels.norm import add_norm, norm

pytestmark = pytest.mark.usefixtures("nan_memory")
WIDTHS = {name: (*route, heads * width) for name, (*route, heads, width) in CASES.items()}


def operands(plan, blocks, width):
    """Rows so small that eps counts."""
    h, a = torch.randn(2, plan.order_N.numel(), width, dtype=torch.float64) / 100
    bias, weight = torch.randn(2, blocks, width, dtype=torch.float64)
    return h, a, bias / 100, weight


def compare_all(case, rows, weights):
    """With everything, without the bias, and the norm alone."""
    *route, width = case
    plan = route_plan(*route)
    h, a, bias, weight = operands(plan, route[2], width)
    found = compare(
        lambda *tensors: add_norm(*tensors, plan.offs_E),
        lambda *tensors: glue.add_norm(*tensors, plan),
        [h, a, bias, weight],
        [rows, rows, weights, weights],
    )
    assert [t.dtype for t in found] == [rows] * 4 + [weights] * 2
    found = compare(
        lambda h, a, weight: add_norm(h, a, None, weight, plan.offs_E),
        lambda h, a, weight: glue.add_norm(h, a, None, weight, plan),
        [h, a, weight],
        [rows, rows, weights],
    )
    assert [t.dtype for t in found] == [rows] * 4 + [weights]
    found = compare(
        lambda h, weight: norm(h, weight, plan.offs_E),
        lambda h, weight: glue.norm(h, weight, plan),
        [h, weight],
        [rows, weights],
    )
    assert [t.dtype for t in found] == [rows, rows, weights]


@pytest.mark.parametrize("case", WIDTHS.values(), ids=WIDTHS.keys())
def test_norms(case):
    compare_all(case, torch.float32, torch.float32)


def test_several_tiles_a_program(long_programs):
    *route, heads, width = SEVERAL_TILES
    compare_all((*route, heads * width), torch.float32, torch.float32)


# bf16 rows with fp32 weights, as in autocast, and all in one precision.
@pytest.mark.parametrize(
    "rows, weights",
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_norms_in_low_precision(rows, weights):
    compare_all((2, 10, 4, 2, 32), rows, weights)


def test_one_block_of_odd_width_and_more_rows_than_a_tile():
    compare_all((1, 9, 1, 1, 1030), torch.float32, torch.float32)


def test_without_a_bias_nothing_is_copied():
    plan = route_plan(1, 4, 2, 1)
    h, a, _, weight = (t.float().to(DEVICE) for t in operands(plan, 2, 8))
    assert add_norm(h, a, None, weight, plan.offs_E)[0] is a


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    h, a, bias, weight = (t.float().to(DEVICE).requires_grad_() for t in operands(plan, 2, 8))
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for arguments in ((h, None, None), (h, a, None), (h, a, bias)):
        arguments = (*arguments, weight, plan.offs_E, 1e-5)
        torch.library.opcheck(torch.ops.mol.add_norm, arguments, test_utils=checks)
