"""RMSNorm kernels against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, compare, route_plan

pytest.importorskip("triton")

from mol.model.config import SplitLayer
from mol.model.thin_block import ThinBlocks
from mol.ops.kernels.norm import add_norm, add_norm_reference, norm, norm_reference

pytestmark = pytest.mark.usefixtures("nan_memory")
WIDTHS = {name: (*route, heads * width) for name, (*route, heads, width) in CASES.items()}
# bf16 rows with fp32 weights, as in autocast, and all in one precision.
PRECISIONS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


def operands(plan, blocks, width):
    h, a = torch.randn(2, plan.order_N.numel(), width, dtype=torch.float64)
    bias, weight = torch.randn(2, blocks, width, dtype=torch.float64)
    return h, a, bias, weight


@pytest.mark.parametrize("case", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("rows, weights", PRECISIONS, ids=str)
def test_norms(case, rows, weights):
    *route, width = case
    plan = route_plan(*route)
    h, a, bias, weight = operands(plan, route[2], width)
    more = (plan.offs_E, 1e-3)
    found = compare(norm, norm_reference, [h, weight], [rows, weights], *more)
    assert [t.dtype for t in found] == [rows, rows, weights]
    inputs, dtypes = [h, a, bias, weight], [rows, rows, weights, weights]
    found = compare(add_norm, add_norm_reference, inputs, dtypes, *more)
    assert [t.dtype for t in found] == [rows, rows, *dtypes]

    def without_bias(function):
        return lambda h, a, weight, *rest: function(h, a, None, weight, *rest)

    pair = without_bias(add_norm), without_bias(add_norm_reference)
    compare(*pair, [h, a, weight], [rows, rows, weights], *more)


def test_one_block_of_odd_width_and_more_rows_than_a_tile():
    plan = route_plan(1, 9, 1, 1)
    h, a, bias, weight = operands(plan, 1, 1030)
    dtypes = [torch.float32] * 4
    compare(add_norm, add_norm_reference, [h, a, bias, weight], dtypes, plan.offs_E)


def test_without_a_bias_nothing_is_copied():
    plan = route_plan(1, 4, 2, 1)
    h, a, _, weight = (t.float().to(DEVICE) for t in operands(plan, 2, 8))
    assert add_norm(h, a, None, weight, plan.offs_E)[0] is a


def test_references_are_the_model_own_path():
    plan = route_plan(2, 11, 3, 2)
    config = SplitLayer(
        d_thin=16, n_heads=2, n_blocks=3, n_shared=0, top_k=2, attention="softmax", d_ff=8
    )
    blocks = ThinBlocks(32, config, 3, "softmax").double()
    h, a, bias, weight = operands(plan, 3, 16)
    wanted = a + plan.expand(bias)
    found = add_norm_reference(h, a, bias, weight, plan.offs_E)
    torch.testing.assert_close(found, (wanted, blocks._normed(h + wanted, weight, plan)))
    wanted = blocks._normed(h, weight, plan)
    torch.testing.assert_close(norm_reference(h, weight, plan.offs_E), wanted)


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    h, a, bias, weight = (t.float().to(DEVICE).requires_grad_() for t in operands(plan, 2, 8))
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for arguments in ((h, None, None), (h, a, None), (h, a, bias)):
        arguments = (*arguments, weight, plan.offs_E, 1e-5)
        torch.library.opcheck(torch.ops.mol.add_norm, arguments, test_utils=checks)
