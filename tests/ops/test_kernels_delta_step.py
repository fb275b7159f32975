"""One step of Gated DeltaNet in one kernel against PyTorch in fp64, over several steps in a row."""

import pytest
import torch
from kernel_cases import DEVICE
from torch import Tensor

pytest.importorskip("triton")

from mol.ops import glue
from mol.ops.dispatch import RoutePlan

pytestmark = pytest.mark.usefixtures("nan_memory")
TAPS, STEPS = 4, 3
# bf16: one rounding of the output, and of the rows before the convolution.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}

# Batch, blocks, slots, heads, width of a head.
CASES = {
    "one sequence": (1, 4, 2, 2, 16),
    "many sequences": (33, 3, 1, 1, 8),
    "odd widths": (3, 5, 2, 3, 12),
    "one block": (4, 1, 1, 1, 20),
    "as wide as a model's": (2, 2, 1, 1, 64),
    "the widest": (1, 2, 1, 1, 128),
}


class Layer:
    """Random weights of some blocks and what their segments hold."""

    def __init__(self, batch: int, blocks: int, heads: int, width: int, dtype: torch.dtype):
        self.batch, self.blocks, self.channels = batch, blocks, 3 * heads * width
        self.columns = 4 * heads * width + 2 * heads
        drawn = {
            "filters_ECJ": torch.randn(blocks, self.channels, TAPS),
            "decay_log_EH": torch.randn(blocks, heads),
            "dt_bias_EH": torch.randn(blocks, heads) - 2,
            "norm_Ed": 1 + 0.3 * torch.randn(blocks, width),
        }
        self.weights = {name: t.to(DEVICE, dtype) for name, t in drawn.items()}
        segments = blocks * batch
        self.tail_SJC = torch.randn(segments, TAPS - 1, self.channels).to(DEVICE, dtype)
        self.state_SHdd = torch.randn(segments, heads, width, width).to(DEVICE)

    def projection(self, plan: RoutePlan, dtype: torch.dtype) -> Tensor:
        """Random, its rows apart and NaN between them."""
        rows = plan.order_N.numel()
        wide = torch.full((rows, self.columns + 8), torch.nan, dtype=dtype, device=DEVICE)
        z_NZ = wide[:, : self.columns]
        z_NZ.copy_(torch.randn(z_NZ.shape))
        return z_NZ

    def reference(self, z_NZ: Tensor, plan: RoutePlan) -> tuple[Tensor, Tensor, Tensor]:
        """Output, tail and state in fp64, which no kernel takes."""
        weights = {name: t.double() for name, t in self.weights.items()}
        tail, state = self.tail_SJC.double(), self.state_SHdd.double()
        return (
            glue.delta_step(z_NZ.double(), **weights, **held(tail, state), plan=plan),
            tail,
            state,
        )


def held(tail: Tensor, state: Tensor) -> dict[str, Tensor]:
    return {"tail_SJC": tail, "state_SHdd": state}


def check(case: tuple, dtype: torch.dtype, weights: torch.dtype, monkeypatch) -> None:
    """Other blocks at each step, so that some segments go on and some rest."""
    batch, blocks, slots, heads, width = case
    layer = Layer(batch, blocks, heads, width, weights)
    for _ in range(STEPS):
        plan = RoutePlan.routed(torch.rand(batch, 1, blocks).topk(slots).indices, blocks)
        z_NZ = layer.projection(plan, dtype)
        resting = torch.ones(blocks * batch, dtype=torch.bool, device=DEVICE)
        resting[plan.segment_N] = False
        # What no row belongs to is neither read nor written.
        layer.state_SHdd[resting], layer.tail_SJC[resting] = torch.nan, torch.nan
        expected = layer.reference(z_NZ, plan)
        with monkeypatch.context() as patch:
            patch.setattr(glue, "has_kernels", lambda tensor: True)
            mine = held(layer.tail_SJC, layer.state_SHdd)
            y_NM = glue.delta_step(z_NZ, **layer.weights, **mine, plan=plan)
        assert y_NM.dtype == dtype
        for found, want in zip((y_NM, *mine.values()), expected, strict=True):
            assert torch.equal(found.isnan(), want.isnan())
            found, want = found.double().nan_to_num(), want.nan_to_num()
            error = (found - want).norm() / want.norm()
            assert error < TOLERANCES[dtype], error
        layer.state_SHdd[resting], layer.tail_SJC[resting] = 0.3, 0.3  # for the next step


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_steps_in_a_row(case, monkeypatch):
    check(case, torch.float32, torch.float32, monkeypatch)


@pytest.mark.parametrize(
    "rows, weights",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),  # autocast
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_in_low_precision(rows, weights, monkeypatch):
    check((5, 4, 2, 2, 16), rows, weights, monkeypatch)


def test_rows_in_any_order(monkeypatch):
    """Each row names its segment and block itself."""
    from mol.ops.kernels.delta_step import delta_step

    layer = Layer(3, 2, 2, 8, torch.float32)
    plan = RoutePlan.full(2, 3, 1, torch.device(DEVICE))
    z_NZ = layer.projection(plan, torch.float32)
    expected, *after = layer.reference(z_NZ, plan)
    turned = torch.tensor([4, 0, 5, 2, 1, 3], device=DEVICE)
    state = held(layer.tail_SJC, layer.state_SHdd)
    rows = {"segment_N": plan.segment_N[turned], "block_N": plan.block_N[turned]}
    found = delta_step(z_NZ[turned], **layer.weights, **state, **rows)
    torch.testing.assert_close(found.double(), expected[turned], rtol=0, atol=1e-5)
    for mine, want in zip(state.values(), after, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=1e-5)


def test_heads_too_wide_for_the_kernel_take_the_reference(monkeypatch):
    layer = Layer(1, 1, 1, 130, torch.float32)
    plan = RoutePlan.full(1, 1, 1, torch.device(DEVICE))
    z_NZ = layer.projection(plan, torch.float32)
    expected, *_ = layer.reference(z_NZ, plan)
    monkeypatch.setattr(glue, "has_kernels", lambda tensor: True)
    state = held(layer.tail_SJC, layer.state_SHdd)
    found = glue.delta_step(z_NZ, **layer.weights, **state, plan=plan)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
