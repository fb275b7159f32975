"""Choice of blocks against the split stage in fp64, and plans by counting against sorting."""

import pytest
import torch

pytest.importorskip("triton")

from mol.model.config import SplitLayer
from mol.model.split_stage import SplitStage
from mol.ops.dispatch import RoutePlan
from mol.ops.kernels import plan as planning
from mol.ops.kernels.plan import plan
from mol.ops.kernels.route import route, tile_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (tokens, width, blocks, slots, over the chosen, dtype of x, dtype of the router): a program for
# each of few tokens, tiles of 16, of 16 in pieces, tiles of 64.
CASES = {
    "one token": (1, 70, 14, 3, True, BF16, BF16),
    "one block": (2, 24, 1, 1, True, FP32, FP32),
    "few tokens, long rows": (3, 1100, 14, 3, False, FP32, FP32),
    "few tokens, all blocks": (3, 33, 64, 64, True, BF16, FP32),
    "tiles": (145, 70, 14, 3, True, FP32, FP32),
    "tiles, every block": (133, 18, 5, 5, False, BF16, FP32),
    "tiles, 16 bits": (150, 530, 20, 2, True, BF16, BF16),
    "pieces side by side": (150, 530, 14, 3, True, BF16, BF16),
    "tiles, fp16": (129, 40, 33, 10, True, FP16, FP16),
    "tall tiles": (170, 20, 14, 1, False, BF16, BF16),
    "tall tiles, fp32": (193, 140, 4, 3, True, FP32, FP32),
}


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that a kernel leaves unwritten holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def framed(t):
    """The same values with a NaN before and many behind them."""
    t = t.to(DEVICE)
    memory = torch.full((t.numel() + 5008,), float("nan"), dtype=t.dtype, device=DEVICE)
    memory[8 : 8 + t.numel()] = t.flatten()
    return memory[8 : 8 + t.numel()].view(t.shape).requires_grad_()


def stage_routes(x_XD, router_ED, slots, over_selected):
    n_blocks, width = router_ED.shape
    config = SplitLayer(
        d_thin=4,
        n_heads=1,
        d_ff=4,
        n_blocks=n_blocks,
        n_shared=0,
        top_k=slots,
        weights_over="selected" if over_selected else "all",
    )
    with torch.device("meta"):
        stage = SplitStage(config, width)
    stage.router = torch.nn.Parameter(router_ED.detach().double())
    return stage.route(x_XD), stage.router


@pytest.mark.parametrize("name", CASES)
def test_route_and_its_gradients(name, monkeypatch):
    monkeypatch.setattr("mol.ops.kernels.route.TALL", 160)
    monkeypatch.setattr("mol.ops.kernels.route.PARTS", 2)  # so that each takes several tiles
    tokens, width, n_blocks, slots, over_selected, dtype, router_dtype = CASES[name]
    x_XD = framed(torch.randn(tokens, width).to(dtype))
    router_ED = framed((2 * torch.randn(n_blocks, width) / width**0.5).to(router_dtype))
    probability_XE, weights_Xk, chosen_Xk, counts_EC = route(x_XD, router_ED, slots, over_selected)
    plain_x_XD = x_XD.detach().double().requires_grad_()
    plain, plain_router_ED = stage_routes(plain_x_XD, router_ED, slots, over_selected)
    assert probability_XE.dtype == weights_Xk.dtype == FP32 and chosen_Xk.dtype == torch.int64
    assert torch.equal(chosen_Xk, plain.chosen_Xk)
    named_XE = torch.nn.functional.one_hot(chosen_Xk, n_blocks).sum(1)
    by_runs = torch.stack([run.sum(0) for run in named_XE.split(tile_rows(tokens))], 1)
    assert counts_EC.dtype == torch.int32 and torch.equal(counts_EC, by_runs.int())
    close = dict(rtol=2e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(probability_XE, plain.probability_XE, **close)
    torch.testing.assert_close(weights_Xk, plain.weights_Xk, **close)

    losses = torch.randn(tokens, n_blocks, device=DEVICE), torch.randn(tokens, slots, device=DEVICE)
    found = torch.autograd.grad([probability_XE, weights_Xk], [x_XD, router_ED], losses)
    expected = torch.autograd.grad(
        [plain.probability_XE, plain.weights_Xk],
        [plain_x_XD, plain_router_ED],
        [loss.double() for loss in losses],
    )
    for gradient, plain_gradient in zip(found, expected, strict=True):
        assert gradient.dtype == (dtype if gradient is found[0] else router_dtype)
        # One rounding, by truncation at worst, beside the error of fp32 sums.
        ulp = torch.finfo(gradient.dtype).eps
        scale = plain_gradient.abs().max().item()
        torch.testing.assert_close(
            gradient.double(), plain_gradient, rtol=ulp, atol=max(2e-6, ulp / 8) * scale
        )


@pytest.mark.parametrize("wanted", ["probability", "weights"])
def test_gradient_through_one_output_alone(wanted):
    x_XD, router_ED = framed(torch.randn(40, 20)), framed(torch.randn(6, 20))
    probability_XE, weights_Xk, *_ = route(x_XD, router_ED, 2, True)
    plain_x_XD = x_XD.detach().double().requires_grad_()
    plain, plain_router_ED = stage_routes(plain_x_XD, router_ED, 2, True)
    outputs = {
        "probability": (probability_XE, plain.probability_XE),
        "weights": (weights_Xk, plain.weights_Xk),
    }
    found, expected = outputs[wanted]
    loss = torch.randn(found.shape, device=DEVICE)
    for gradient, plain_gradient in zip(
        torch.autograd.grad(found, [x_XD, router_ED], loss),
        torch.autograd.grad(expected, [plain_x_XD, plain_router_ED], loss.double()),
        strict=True,
    ):
        torch.testing.assert_close(gradient.double(), plain_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 140])
def test_equal_scores_go_to_the_lower_number(tokens):
    """Small whole numbers make exact scores, and repeated router rows equal ones."""
    x_XD = torch.randint(-2, 3, (tokens, 16), device=DEVICE).float()
    router_ED = torch.randint(-1, 2, (3, 16), device=DEVICE).float().repeat(3, 1)
    probability_XE, weights_Xk, chosen_Xk, _ = route(x_XD, router_ED, 5, False)
    ordered_XE, number_XE = probability_XE.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(chosen_Xk, number_XE[:, :5])
    assert torch.equal(weights_Xk, ordered_XE[:, :5])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("tokens", [2, 130])
def test_a_row_of_nan_still_names_distinct_blocks(tokens):
    """A plan of such routes must not lead a kernel out of its memory."""
    x_XD = torch.randn(tokens, 8, device=DEVICE)
    x_XD[1] = float("nan")
    _, weights_Xk, chosen_Xk, _ = route(x_XD, torch.randn(6, 8, device=DEVICE), 4, True)
    assert chosen_Xk[1].tolist() == [0, 1, 2, 3]
    assert weights_Xk[1].isnan().all() and not weights_Xk[0].isnan().any()


FIELDS = "order_N inverse_N block_N within_N time_N segment_N offs_E cu_seqlens".split()


def check_plan(chosen_BTk, n_blocks):
    batch, length, slots = chosen_BTk.shape
    chosen_BTk = chosen_BTk.to(DEVICE)
    sorted_plan = RoutePlan.routed(chosen_BTk, n_blocks)
    counted = plan(chosen_BTk.view(-1, slots), batch, length, n_blocks)
    for name, found in zip(FIELDS, counted, strict=True):
        expected = getattr(sorted_plan, name)
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


# (sequences, positions, slots, blocks): one launch or two, one step of decoding, tile edges.
PLANS = [
    (1, 1, 1, 1),
    (1, 1, 3, 14),
    (1, 1, 64, 64),
    (64, 1, 3, 14),
    (129, 1, 3, 14),
    (257, 1, 2, 5),
    (1, 255, 3, 14),
    (1, 256, 2, 10),
    (1, 257, 3, 14),
    (4, 255, 3, 14),
    (2, 300, 1, 3),
    (20, 2, 3, 5),
    (2, 65, 8, 64),
    (1, 700, 5, 33),
]


@pytest.mark.parametrize("shape", PLANS, ids=str)
def test_plan_is_that_of_sorting(shape):
    batch, length, slots, n_blocks = shape
    check_plan(torch.rand(batch, length, n_blocks).argsort(-1)[..., :slots], n_blocks)


def test_plans_of_random_shapes():
    for _ in range(12):
        n_blocks, batch = (int(torch.randint(1, high, ())) for high in (12, 4))
        slots = int(torch.randint(1, n_blocks + 1, ()))
        length = int(torch.randint(1, 300, ()))
        # Steep odds leave blocks and segments empty.
        odds = torch.randn(n_blocks) * 4 + torch.randn(batch, length, n_blocks)
        check_plan(odds.topk(slots).indices, n_blocks)


@pytest.mark.parametrize("batch, length", [(1, 600), (3, 70), (5, 1)])
def test_plan_of_all_tokens_to_one_block(batch, length):
    check_plan(torch.full((batch, length, 1), 2), 4)


def test_plan_of_long_sequences(monkeypatch):
    """A program takes several tiles where a sequence has more than there may be programs."""
    monkeypatch.setattr("mol.ops.kernels.plan.PLANNERS", 2)
    check_plan(torch.rand(2, 1100, 6).argsort(-1)[..., :2], 6)


# (sequences, positions, whether the counts of `route` serve): a token a run, 16, 64, ...
COUNTED = {
    "a token a run": (2, 50, True),
    "one sequence": (1, 215, True),
    "whole runs": (3, 48, True),
    "runs of two sequences": (3, 70, False),
    "steps of many sequences": (150, 1, True),
    "tall": (2, 192, True),
    "tall, one sequence": (1, 331, True),
    "tall, runs of two sequences": (2, 200, False),
    "more runs than programs": (1, 255, False),
}


@pytest.mark.parametrize("name", COUNTED)
def test_plan_by_the_counts_of_the_choice(name, monkeypatch):
    batch, length, serve = COUNTED[name]
    monkeypatch.setattr("mol.ops.kernels.route.TALL", 330)
    monkeypatch.setattr(planning, "PLANNERS", 15 if name == "more runs than programs" else 512)
    x_XD, router_ED = torch.randn(batch * length, 24), torch.randn(14, 24)
    router_ED[1] = 0  # a block that few tokens name
    *_, chosen_Xk, counts_EC = route(x_XD.to(DEVICE), router_ED.to(DEVICE), 2, True)
    expected = plan(chosen_Xk, batch, length, 14)
    if serve:
        monkeypatch.setattr(planning, "_count", None)
    found = plan(chosen_Xk, batch, length, 14, counts_EC)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


def test_operators_as_a_compiler_sees_them():
    x_XD, router_ED = framed(torch.randn(5, 20)), framed(torch.randn(6, 20))
    torch.library.opcheck(route.recorded, (x_XD, router_ED, 2, True))
    chosen_Xk = torch.rand(10, 6, device=DEVICE).argsort(-1)[:, :2].contiguous()
    torch.library.opcheck(plan.recorded, (chosen_Xk, 2, 5, 6))
    counts_EC = route(x_XD.repeat(2, 1), router_ED, 2, True)[3]
    torch.library.opcheck(plan.recorded, (chosen_Xk, 2, 5, 6, counts_EC))
