"""Kernels around the gated delta rule against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, compare, route_plan

pytest.importorskip("triton")

from mol.model.delta import GatedDeltaNet
from mol.ops.gated_delta.naive import l2norm
from mol.ops.kernels.mix import (
    delta_inputs,
    delta_inputs_reference,
    gated_norm,
    gated_norm_reference,
)
from mol.ops.short_conv import short_conv_reference

pytestmark = pytest.mark.usefixtures("nan_memory")


def projection(rows, *columns):
    """Views of one tensor, as a split projection gives them."""
    return torch.randn(rows, sum(columns), dtype=torch.float64).split(columns, -1)


def delta_operands(blocks, heads, width, plan):
    channels = 3 * heads * width
    rows = plan.order_N.numel()
    qkv, _, ab = projection(rows, channels, heads * width, 2 * heads)
    filters = torch.randn(blocks, channels, 4, dtype=torch.float64)
    decay_log, dt_bias = torch.randn(2, blocks, heads, dtype=torch.float64).unbind()
    return [qkv, ab, filters, decay_log, dt_bias - 4], (plan.within_N, plan.offs_E)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_delta_inputs(case):
    *route, heads, width = case
    plan = route_plan(*route)
    inputs, rest = delta_operands(route[2], heads, width, plan)
    found = compare(delta_inputs, delta_inputs_reference, inputs, [torch.float32] * 5, *rest)
    assert [t.dtype for t in found[:5]] == [torch.float32] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, None], ids=["fp32 weights", "all narrow"])
def test_delta_inputs_in_low_precision(dtype, weights):
    plan = route_plan(2, 10, 4, 2)
    inputs, rest = delta_operands(4, 2, 16, plan)
    dtypes = [dtype] * 2 + [weights or dtype] * 3
    found = compare(delta_inputs, delta_inputs_reference, inputs, dtypes, *rest)
    kept = [dtype] * 3 + [torch.float32] * 2
    assert [t.dtype for t in found] == kept + dtypes


def test_delta_inputs_reference_is_the_model_own_path():
    """Convolution by conv1d a segment, rates by the layer."""
    plan = route_plan(2, 11, 3, 2)
    (qkv, ab, filters, decay_log, dt_bias), rest = delta_operands(3, 2, 8, plan)
    q, k, v, g, beta = delta_inputs_reference(qkv, ab, filters, decay_log, dt_bias, *rest)
    layer = GatedDeltaNet(16, 2, stack=3).double()
    layer.decay_log.data, layer.dt_bias.data = decay_log, dt_bias
    mixed = torch.nn.functional.silu(short_conv_reference(qkv, filters, plan))
    wanted = mixed.view(-1, 3, 2, 8).unbind(1)
    torch.testing.assert_close((l2norm(wanted[0]), l2norm(wanted[1]), wanted[2]), (q, k, v))
    torch.testing.assert_close(layer._rates(*ab.split(2, -1), plan), (g, beta))


def test_small_rates_keep_their_precision():
    """softplus(-25) is 1e-11, far below one unit in the last place of 1."""
    ab = torch.full((3, 2), -25.0, device=DEVICE)
    ab[1] = 30.0
    qkv, filters = torch.ones(3, 24, device=DEVICE), torch.ones(1, 24, 4, device=DEVICE)
    zero = torch.zeros(1, 1, device=DEVICE)
    rows = torch.arange(3, device=DEVICE)
    offs = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    g = delta_inputs(qkv, ab, filters, zero, zero, rows, offs)[3]
    wanted = -torch.nn.functional.softplus(ab[:, :1].double(), threshold=100)
    torch.testing.assert_close(g.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gated_norm(case):
    *route, heads, width = case
    plan = route_plan(*route)
    rows = plan.order_N.numel()
    _, gate, _ = projection(rows, 3 * heads * width, heads * width, 2 * heads)
    o = torch.randn(rows, heads, width, dtype=torch.float64)
    norm = torch.randn(route[2], width, dtype=torch.float64)
    compare(gated_norm, gated_norm_reference, [o, gate, norm], [torch.float32] * 3, plan.offs_E)
    mixed = [torch.bfloat16, torch.bfloat16, torch.float32]
    compare(gated_norm, gated_norm_reference, [o, gate, norm], mixed, plan.offs_E, 1e-2)


def test_gated_norm_reference_is_the_model_own_path():
    plan = route_plan(2, 11, 3, 2)
    layer = GatedDeltaNet(16, 2, stack=3).double()
    layer.norm.data = torch.randn(3, 8, dtype=torch.float64)
    layer.out.data = torch.eye(16, dtype=torch.float64).repeat(3, 1, 1)
    o, gate = torch.randn(44, 2, 8, dtype=torch.float64), torch.randn(44, 16, dtype=torch.float64)
    wanted = layer._finish(o, gate, plan)
    torch.testing.assert_close(gated_norm_reference(o, gate, layer.norm, plan.offs_E), wanted)


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    inputs, rest = delta_operands(2, 1, 8, plan)
    inputs = [t.float().to(DEVICE).contiguous().requires_grad_() for t in inputs]
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(delta_inputs, (*inputs, *rest), test_utils=checks)
    gate = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    o = gate.detach().view(5, 1, 8).clone().requires_grad_()
    norm = torch.randn(2, 8, device=DEVICE, requires_grad=True)
    torch.library.opcheck(gated_norm, (o, gate, norm, plan.offs_E), test_utils=checks)
