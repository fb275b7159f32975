"""Route plans against plain loops, over routes that hypothesis draws."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mol.ops.dispatch import RoutePlan, reference_rows, segment_sum
from mol.ops.short_conv import short_conv, short_conv_reference


@st.composite
def routes(draw):
    """(idx [B, T, k], E): distinct blocks a token, skewed so that some blocks stay empty."""
    n_blocks = draw(st.integers(1, 7))
    slots = draw(st.integers(1, n_blocks))
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    order = st.permutations(range(n_blocks)).map(lambda p: list(p)[:slots])
    favorite = draw(order)
    token = st.one_of(st.just(favorite), order)
    rows = draw(st.lists(token, min_size=batch * length, max_size=batch * length))
    return torch.tensor(rows).view(batch, length, slots), n_blocks


def every(n_blocks, batch, length):
    return torch.arange(n_blocks).expand(batch, length, n_blocks)


def check_plan(plan, idx, n_blocks):
    batch, length, slots = idx.shape
    segments = reference_rows(idx, n_blocks)
    edges = [0]
    for segment, rows in enumerate(segments):
        start = edges[-1]
        edges.append(start + len(rows))
        for within, (t, slot) in enumerate(rows):
            row = start + within
            pair = ((segment % batch) * length + t) * slots + slot
            assert plan.order_N[row] == pair and plan.inverse_N[pair] == row
            assert plan.block_N[row] == segment // batch
            assert plan.segment_N[row] == segment
            assert plan.within_N[row] == within and plan.time_N[row] == t
    assert plan.cu_seqlens.tolist() == edges and plan.cu_seqlens.dtype == torch.int32
    assert plan.offs_E.tolist() == edges[batch::batch] and plan.offs_E.dtype == torch.int32
    assert plan.order_N.numel() == edges[-1]


@settings(max_examples=60, deadline=None)
@given(routes())
def test_routed_plan(drawn):
    idx, n_blocks = drawn
    check_plan(RoutePlan.routed(idx, n_blocks), idx, n_blocks)


@pytest.mark.parametrize("n_blocks, batch, length", [(1, 1, 1), (3, 2, 5), (5, 1, 4), (1, 3, 2)])
def test_full_plan(n_blocks, batch, length):
    plan = RoutePlan.full(n_blocks, batch, length, torch.device("cpu"))
    check_plan(plan, every(n_blocks, batch, length), n_blocks)
    assert plan.equal


@settings(max_examples=30, deadline=None)
@given(routes(), st.booleans())
def test_gather_combine_expand_and_their_gradients(drawn, full):
    idx, n_blocks = drawn
    batch, length, _ = idx.shape
    plan = RoutePlan.routed(idx, n_blocks)
    if full:
        idx = every(n_blocks, batch, length)
        plan = RoutePlan.full(n_blocks, batch, length, idx.device)
    slots = idx.shape[2]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, scale, weights = draw(batch * length, 3), draw(n_blocks, 3), draw(batch * length, slots)
    y = plan.combine(plan.gather(x) * plan.expand(scale), weights)
    y = y + plan.combine(plan.gather(x))
    rows = []
    for token, blocks in enumerate(idx.reshape(-1, slots).tolist()):
        terms = [x[token] * scale[b] * weights[token, i] + x[token] for i, b in enumerate(blocks)]
        rows.append(sum(terms))
    plain = torch.stack(rows)
    torch.testing.assert_close(y, plain, rtol=1e-12, atol=1e-12)
    generator.manual_seed(1)
    loss = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad((y * loss).sum(), [x, scale, weights]),
        torch.autograd.grad((plain * loss).sum(), [x, scale, weights]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_segment_sum_of_empty_blocks_is_zero():
    sums = segment_sum(torch.ones(3, 2), torch.tensor([1, 1, 3]), 5)
    assert sums.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


@settings(max_examples=30, deadline=None)
@given(routes())
def test_short_convolution(drawn):
    idx, n_blocks = drawn
    plan = RoutePlan.routed(idx, n_blocks)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(plan.order_N.numel(), 3, generator=generator, dtype=torch.float64)
    filters = torch.randn(n_blocks, 3, 4, generator=generator, dtype=torch.float64)
    x.requires_grad_(), filters.requires_grad_()
    found, expected = (f(x, filters, plan) for f in (short_conv, short_conv_reference))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    loss = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * loss).sum(), [x, filters]),
        torch.autograd.grad((expected * loss).sum(), [x, filters]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
