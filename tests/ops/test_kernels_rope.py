"""The kernel of bias and rotary positions against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, SEVERAL_TILES, compare, route_plan

pytest.importorskip("triton")

from mol.ops import glue
from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan
from mol.ops.kernels.rope import bias_rope

pytestmark = pytest.mark.usefixtures("nan_memory")


def operands(plan, blocks, heads, width):
    """A projection with its rows apart, and the blocks' biases."""
    rows, columns = plan.order_N.numel(), 3 * heads * width
    wide = torch.randn(rows, columns + 16, dtype=torch.float64)
    return [wide[:, :columns], torch.randn(blocks, columns, dtype=torch.float64)]


def compare_rope(case, rows, weights):
    *route, heads, width = case
    plan, rope = route_plan(*route), Rope(width)
    tables = rope.tables(plan.length, DEVICE, torch.float32)
    found = compare(
        lambda qkv, bias: bias_rope(qkv, bias, *tables, plan.time_N, plan.offs_E),
        lambda qkv, bias: glue.biased_heads(qkv, bias, heads, rope, plan, 0, plan.length),
        operands(plan, route[2], heads, width),
        [rows, weights],
    )
    assert [t.dtype for t in found] == [rows] * 4 + [weights]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bias_rope(case):
    compare_rope(case, torch.float32, torch.float32)


def test_several_tiles_a_program(long_programs):
    compare_rope(SEVERAL_TILES, torch.float32, torch.float32)


@pytest.mark.parametrize(
    "rows, weights",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_bias_rope_in_low_precision(rows, weights):
    compare_rope((2, 10, 4, 2, 2, 16), rows, weights)


@torch.no_grad()
@pytest.mark.parametrize("time", [5, torch.tensor([5]), torch.tensor([5, 0, 9, 2, 7, 7])], ids=str)
def test_a_step_at_a_position_of_all_or_of_each(time, monkeypatch):
    plan, rope = RoutePlan.full(2, 3, 1, torch.device(DEVICE)), Rope(12)
    qkv, bias = (t.to(DEVICE) for t in operands(plan, 2, 2, 12))
    time = time if isinstance(time, int) else time.to(DEVICE)
    expected = glue.biased_heads(qkv, bias, 2, rope, plan, time, 10)
    monkeypatch.setattr(glue, "has_kernels", lambda tensor: True)
    found = glue.biased_heads(qkv.float(), bias.float(), 2, rope, plan, time, 10)
    for mine, want in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=1e-5)


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    tables = Rope(8).tables(plan.length, DEVICE, torch.float32)
    inputs = [t.float().to(DEVICE).contiguous().requires_grad_() for t in operands(plan, 2, 1, 8)]
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    arguments = (*inputs, *tables, plan.time_N, plan.offs_E)
    torch.library.opcheck(bias_rope.recorded, arguments, test_utils=checks)
