"""Grouped products with gradients as on CUDA, by PyTorch's products and by the project's kernels,
against row by row products in fp64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from torch.utils.checkpoint import checkpoint

from mol.ops import grouped, grouped_train
from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import ffn_sum, gathered_mm, grouped_mm
from mol.ops.kernels.grouped_gemm import Tiles
from mol.ops.kernels.grouped_weight import WeightTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, INNER, BLOCKS = 48, 80, 4
PARTS = "plain", "gathered", "gelu", "add", "rows", "weight", "gathered_weight"
# Tiles that end inside of both widths.
OWN = {
    "own": (Tiles(32, 64, 16, 4, 2, tma=True, resident=True), WeightTiles(32, 64, 16, 4, 2)),
    "own, by loads": (Tiles(32, 64, 32, 4, 2), WeightTiles(64, 32, 16, 4, 2, tma=False)),
}


@pytest.fixture(params=["torch", *OWN])
def way(request, monkeypatch, nan_memory):
    """Who computes: PyTorch, or the project's kernels."""
    monkeypatch.setattr(grouped, "has_kernels", lambda tensor: True)
    if request.param != "torch":
        of_rows, of_weights = OWN[request.param]
        keys = [(part, *widths) for part in PARTS for widths in ((WIDTH, INNER), (INNER, WIDTH))]
        tiles = {key: of_weights if key[0].endswith("weight") else of_rows for key in keys}
        monkeypatch.setattr(grouped_train, "OWN", tiles)
    return request.param


def plan_of(kind):
    if kind == "full":
        return RoutePlan.full(2, 2, 9, DEVICE)
    if kind == "one block":
        return RoutePlan.full(1, 2, 9, DEVICE)
    # Block 1 gets no row, block 3 one.
    chosen_BTk = torch.tensor([0, 2]).expand(2, 10, 2).clone()
    chosen_BTk[1, 4, 1] = 3
    return RoutePlan.routed(chosen_BTk.to(DEVICE), BLOCKS)


def draw(*shape, scale=1.0):
    return (torch.randn(shape) * scale).to(DEVICE, torch.bfloat16).requires_grad_()


def compare(function, plain, *inputs):
    """Output and gradients of all inputs, in bf16 against fp64, and where they are recomputed."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    results = []
    for run, leaves in (
        (function, inputs),
        (plain, wide),
        (lambda *t: checkpoint(function, *t, use_reentrant=False), inputs),
    ):
        y = run(*leaves)
        torch.manual_seed(1)
        toward = torch.randn(y.shape).to(y.device, torch.bfloat16)
        results.append([y, *torch.autograd.grad(y, leaves, toward.to(y.dtype))])
    for found, expected, again in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        assert (found.double() - expected).norm() <= 1e-2 * expected.norm()
        assert torch.equal(found, again)


def by_rows(x, w, plan):
    return torch.einsum("nk,nkm->nm", x, w[plan.block_N])


@pytest.mark.parametrize("kind", ["routed", "full", "one block"])
def test_products(way, kind):
    plan = plan_of(kind)
    rows = len(plan.order_N)
    x, w, add = draw(rows, WIDTH), draw(plan.n_blocks, WIDTH, INNER), draw(rows, INNER)
    given = plan.offs_E, plan.equal
    compare(lambda x, w: grouped_mm(x, w, *given), lambda x, w: by_rows(x, w, plan), x, w)
    compare(
        lambda x, w, add: grouped_mm(x, w, *given, add_NM=add),
        lambda x, w, add: by_rows(x, w, plan) + add,
        *(x, w, add),
    )
    compare(
        lambda x, w: gathered_mm(x, w, plan),
        lambda x, w: by_rows(x[plan.order_N // plan.slots], w, plan),
        *(draw(plan.batch * plan.length, WIDTH), w),
    )


@pytest.mark.parametrize("kind", ["routed", "full", "one block"])
def test_feed_forward_network(way, kind):
    plan = plan_of(kind)
    rows = len(plan.order_N)
    w_in = draw(plan.n_blocks, WIDTH, INNER, scale=WIDTH**-0.5)
    w_out = draw(plan.n_blocks, INNER, WIDTH, scale=INNER**-0.5)

    def plain(h, w_in, w_out, add):
        inner = F.gelu(by_rows(h, w_in, plan), approximate="tanh")
        return add + by_rows(inner, w_out, plan)

    inputs = draw(rows, WIDTH), w_in, w_out, draw(rows, WIDTH)
    compare(lambda *t: ffn_sum(*t, plan), plain, *inputs)


def test_only_wanted_gradients(monkeypatch):
    """Frozen rows or matrices get none, and the others' stay the same."""
    monkeypatch.setattr(grouped, "has_kernels", lambda tensor: True)
    plan = plan_of("routed")
    rows = len(plan.order_N)
    w_in, w_out = draw(BLOCKS, WIDTH, INNER), draw(BLOCKS, INNER, WIDTH)
    inputs = [draw(rows, WIDTH), w_in, w_out, draw(rows, WIDTH)]
    every = torch.autograd.grad(ffn_sum(*inputs, plan).sum(), inputs)
    for number, expected in enumerate(every):
        leaves = [t.detach().requires_grad_(i == number) for i, t in enumerate(inputs)]
        ffn_sum(*leaves, plan).sum().backward()
        assert torch.equal(leaves[number].grad, expected)
        assert all(t.grad is None for i, t in enumerate(leaves) if i != number)
