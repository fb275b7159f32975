"""Kernels around the gated delta rule against PyTorch in fp64, every output and gradient."""

import pytest
import torch
from kernel_cases import CASES, DEVICE, SEVERAL_TILES, compare, route_plan

pytest.importorskip("triton")

from mol.ops import glue
from mol.ops.gated_delta.naive import l2norm
from mol.ops.kernels import delta_solve, mix
from mol.ops.kernels.gated_norm import gated_norm
from mol.ops.kernels.mix import delta_inputs

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
    return [qkv, ab, filters, decay_log, dt_bias - 4]


def compare_inputs(case, dtype, weights):
    *route, heads, width = case
    plan = route_plan(*route)
    dtypes = [dtype] * 2 + [weights] * 3

    def kernel(*operands):
        return delta_inputs(*operands, plan.within_N, plan.offs_E, plan.cu_seqlens)

    def plain(*operands):
        (q, k, *rest), unit = glue.delta_inputs(*operands, plan)
        assert not unit
        return l2norm(q), l2norm(k), *rest

    found = compare(kernel, plain, delta_operands(route[2], heads, width, plan), dtypes)
    assert [t.dtype for t in found] == [dtype] * 3 + [torch.float32] * 2 + dtypes


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_delta_inputs(case):
    compare_inputs(case, torch.float32, torch.float32)


def test_several_tiles_a_program(long_programs):
    compare_inputs(SEVERAL_TILES, torch.float32, torch.float32)
    compare_gated(SEVERAL_TILES, torch.float32)


@pytest.mark.parametrize("case", ["odd width", "routed", "many blocks"])
def test_heads_apart_and_long_programs(case, monkeypatch):
    """A program has one head of several; whole segments; and looks for them in several rounds."""
    monkeypatch.setitem(mix.TILES, "channels", 8)
    monkeypatch.setitem(mix.TILES, "programs", 0)
    monkeypatch.setattr(delta_solve, "SEARCHED", 2)
    compare_inputs(CASES[case], torch.float32, torch.float32)


@torch.no_grad()
def test_rows_past_the_end_are_left_alone():
    """Nor does what stands before a segment, or behind it, leak in."""
    blocks, heads, width = 3, 2, 8
    edges = torch.tensor([0, 0, 17, 17, 21, 22, 22], dtype=torch.int32, device=DEVICE)
    qkv, ab = torch.randn(30, 3 * heads * width), torch.randn(30, 2 * heads)
    weights = torch.randn(blocks, 3 * heads * width, 4), *torch.randn(2, blocks, heads)
    weights = [t.to(DEVICE) for t in weights]

    def run(rows, edges):
        index = torch.zeros(30, dtype=torch.int64, device=DEVICE)[rows], edges[2::2]
        operands = (qkv[rows].to(DEVICE), ab[rows].to(DEVICE), *weights, *index)
        return delta_inputs(*operands, edges)

    whole = run(slice(0, 30), edges)
    assert all(t[:22].isfinite().all() and t[22:].isnan().all() for t in whole)
    first = run(slice(0, 17), edges.clamp(max=17))
    last = run(slice(17, 22), (edges - 17).clamp(min=0))
    for together, *apart in zip(whole, first, last, strict=True):
        assert torch.equal(together[:22], torch.cat(apart))


@pytest.mark.parametrize(
    "dtype, weights",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_delta_inputs_in_low_precision(dtype, weights):
    compare_inputs((2, 8, 3, 2, 1, 16), dtype, weights)


def test_small_rates_keep_their_precision():
    """softplus(-25) is 1e-11, far below one unit in the last place of 1. On a GPU e^x is 2^y with
    y = 36 rounded to 2^-19, so not better than 2e-6."""
    ab = torch.full((3, 2), -25.0, device=DEVICE)
    ab[1] = 30.0
    qkv, filters = torch.ones(3, 24, device=DEVICE), torch.ones(1, 24, 4, device=DEVICE)
    zero = torch.zeros(1, 1, device=DEVICE)
    rows = torch.arange(3, device=DEVICE)
    edges = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    g = delta_inputs(qkv, ab, filters, zero, zero, rows, edges[1:], edges)[3]
    wanted = -torch.nn.functional.softplus(ab[:, :1].double(), threshold=100)
    torch.testing.assert_close(g.double(), wanted, rtol=5e-6, atol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm(case, dtype):
    compare_gated(case, dtype)


def compare_gated(case, dtype):
    *route, heads, width = case
    plan = route_plan(*route)
    rows = plan.order_N.numel()
    _, gate, _ = projection(rows, 3 * heads * width, heads * width, 2 * heads)
    o = torch.randn(rows, heads, width, dtype=torch.float64) / 100  # so small that eps counts
    norm = torch.randn(route[2], width, dtype=torch.float64)
    dtypes = [dtype, dtype, torch.float32]
    found = compare(
        lambda *operands: gated_norm(*operands, plan.offs_E),
        lambda *operands: glue.gated_norm(*operands, plan),
        [o, gate, norm],
        dtypes,
    )
    assert [t.dtype for t in found] == [dtype, *dtypes]


def test_no_rows():
    empty = torch.zeros(0, 26, device=DEVICE, requires_grad=True)
    qkv, ab = empty.split([24, 2], -1)
    filters = torch.ones(2, 24, 4, device=DEVICE, requires_grad=True)
    rate = torch.ones(2, 1, device=DEVICE)
    edges = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    offs = edges[1:]
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, *_ = delta_inputs(qkv, ab, filters, rate, rate, rows, offs, edges)
    y = gated_norm(q, qkv[:, :8], torch.ones(2, 8, device=DEVICE), offs)
    y.sum().backward()
    assert y.shape == (0, 8) and filters.grad.abs().max() == 0


def test_compilers_know_the_shapes_and_gradients():
    plan = route_plan(1, 5, 2, 1)
    inputs = [
        t.float().to(DEVICE).contiguous().requires_grad_() for t in delta_operands(2, 1, 8, plan)
    ]
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    arguments = (*inputs, plan.within_N, plan.offs_E, plan.cu_seqlens)
    torch.library.opcheck(delta_inputs.recorded, arguments, test_utils=checks)
    gate = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    o = gate.detach().view(5, 1, 8).clone().requires_grad_()
    norm = torch.randn(2, 8, device=DEVICE, requires_grad=True)
    torch.library.opcheck(gated_norm.recorded, (o, gate, norm, plan.offs_E), test_utils=checks)
