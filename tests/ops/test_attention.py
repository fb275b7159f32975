"""Packed causal attention against masks, and rotary positions."""

import pytest
import torch

from mol.ops.attention import (
    Rope,
    segment_attention,
    segment_attention_reference,
    step_in_cache,
)

LENGTHS = [[1], [0, 1, 37, 0, 5, 1], [6, 6, 6], [0, 9]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("slack", [0, 3])
def test_segments(lengths, dtype, tolerance, slack):
    """`longest` may exceed the longest segment."""
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shape = (3, sum(lengths), 2, 6)
    q, k, v = torch.randn(shape, generator=generator).to(dtype).requires_grad_().unbind(0)
    loss = torch.randn(shape[1:], generator=generator).to(dtype)
    fast = segment_attention(q, k, v, cu_seqlens, max(lengths) + slack)
    plain = segment_attention_reference(q, k, v, cu_seqlens)
    results = [
        [y, *torch.autograd.grad((y * loss).sum(), [q, k, v], retain_graph=True)]
        for y in (fast, plain)
    ]
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm() + tolerance


def test_a_row_joins_its_segment_and_sees_what_it_holds():
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 3, 2, 6, generator=generator).double()
    cached = torch.randn(2, 4, 2, 9, 6, generator=generator).double()
    cached[:, :, :, 7:] = torch.nan
    before, segment, used = cached.clone(), torch.tensor([2, 0, 3]), torch.tensor([0, 5, 6, 3])
    found = step_in_cache(q, k, v, *cached, segment, used, longest=7)
    assert used.tolist() == [1, 5, 7, 4]
    assert torch.equal(cached[:, 1].nan_to_num(), before[:, 1].nan_to_num())
    for n, (s, length) in enumerate(((2, 7), (0, 1), (3, 4))):
        keys, values = cached[:, s, :, :length]
        assert torch.equal(keys[:, -1], k[n]) and torch.equal(values[:, -1], v[n])
        assert torch.equal(cached[:, s, :, : length - 1], before[:, s, :, : length - 1])
        weights = (torch.einsum("hld,hd->hl", keys, q[n]) * 6**-0.5).softmax(-1)
        expected = torch.einsum("hl,hld->hd", weights, values)
        torch.testing.assert_close(found[n], expected, rtol=1e-12, atol=1e-12)


def test_rope_turns_pairs_by_position():
    rope, x = Rope(4, base=100.0), torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    angle = torch.tensor([7.0, 7.0 / 10], dtype=torch.float64)  # rates base^0, base^(-1/2)
    a, b = x[..., :2], x[..., 2:]
    expected = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    torch.testing.assert_close(rope(x, torch.tensor([7]), 8), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(rope(x, 7, 8), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(rope(x.repeat(3, 1, 1), torch.tensor([7]), 8)[2:], expected)


def test_rope_scores_depend_on_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)
    rope = Rope(8)
    near = (rope(q, 5, 6) * rope(k, 2, 6)).sum()
    far = (rope(q, 1005, 1006) * rope(k, 1002, 1006)).sum()
    assert abs(near - far) < 1e-12


def test_outgrown_tables_stay_where_they_are():
    """A recorded graph reads them at their address, whatever length is asked for later."""
    rope = Rope(8)
    short = rope.tables(100, torch.device("cpu"), torch.float32)
    copies, addresses = [t.clone() for t in short], [t.data_ptr() for t in short]
    del short
    longer = [rope.tables(n, torch.device("cpu"), torch.float32) for n in (300, 5000)]
    kept = {t.data_ptr(): t for tables in rope._outgrown for t in tables}
    for copy, address in zip(copies, addresses, strict=True):
        assert torch.equal(kept[address], copy)
    assert longer[1][0].shape[0] >= 5000


def test_rope_grows_and_survives_inference_mode():
    rope = Rope(8)
    with torch.inference_mode():
        rope(torch.ones(1, 1, 8), 3, 4)
    x = torch.ones(1, 1, 8, requires_grad=True)
    rope(x, torch.tensor([3]), 4).sum().backward()
    assert x.grad.isfinite().all()
    first = rope(x, 3, 4)
    rope(x, 5000, 5001)
    assert torch.equal(first, rope(x, 3, 4))


def test_rope_refuses_odd_heads():
    with pytest.raises(ValueError, match="odd"):
        Rope(7)
