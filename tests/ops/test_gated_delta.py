"""Chunked gated delta rule against the recurrence: outputs, states and every gradient."""

import pytest
import torch

from mol.ops import gated_delta
from mol.ops.gated_delta import (
    by_fla,
    chunked_gated_delta_rule,
    fuses_norm,
    gated_delta_rule,
    gated_delta_step,
    naive_gated_delta_rule,
)
from mol.ops.gated_delta.fla import CHUNK, chunk_table

LENGTHS = {
    "one row": [1],
    "one segment": [37],
    "mixed": [0, 1, 16, 0, 5, 17, 1, 40, 0],
    "long and short": [130, 1, 0, 3],
    "equal": [33, 33],
    "no rows": [0, 0],
}


def inputs(lengths, heads=2, width=6, value_width=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, segments = sum(lengths), len(lengths)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(rows, heads, width), draw(rows, heads, width), draw(rows, heads, value_width)
    g, beta = -2 * draw(rows, heads).abs(), draw(rows, heads).sigmoid()
    state = draw(segments, heads, width, value_width)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tensors = [t.to(dtype).requires_grad_() for t in (q, k, v, g, beta, state)]
    return tensors[:5], cu_seqlens, tensors[5]


def outputs_and_gradients(rule, tensors, cu_seqlens, state):
    output, final = rule(*tensors, cu_seqlens, state, True)
    loss = (output * torch.linspace(-1, 1, output.numel()).view_as(output).to(output)).sum()
    loss = loss + (final * torch.linspace(1, -1, final.numel()).view_as(final).to(final)).sum()
    wanted = [*tensors, state] if state is not None else tensors
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [output, final, *grads]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_chunked_equals_recurrence(lengths, with_state, dtype, tolerance):
    tensors, cu_seqlens, state = inputs(lengths, dtype=dtype)
    state = state if with_state else None
    if not sum(lengths):
        output, final = chunked_gated_delta_rule(*tensors, cu_seqlens, state, True)
        assert output.shape == tensors[2].shape
        assert torch.equal(final, torch.zeros_like(final) if state is None else state)
        return
    fast = outputs_and_gradients(chunked_gated_delta_rule, tensors, cu_seqlens, state)
    plain = outputs_and_gradients(naive_gated_delta_rule, tensors, cu_seqlens, state)
    for found, expected in zip(fast, plain, strict=True):
        scale = expected.norm().clamp(min=1e-30)
        assert (found - expected).norm() / scale <= tolerance


def test_recurrence_is_the_equation():
    """Two rows by hand, with matrices."""
    (q, k, v, g, beta), cu_seqlens, state = inputs([2], heads=1)
    output, final = naive_gated_delta_rule(q, k, v, g, beta, cu_seqlens, state, True)
    unit = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k)]
    s = state[0, 0]
    for t in range(2):
        q_t, k_t = unit[0][t, 0], unit[1][t, 0]
        s = g[t, 0].exp() * s
        s = s + torch.outer(k_t, beta[t, 0] * (v[t, 0] - s.t() @ k_t))
        assert torch.allclose(output[t, 0], s.t() @ q_t / 6**0.5, rtol=1e-12)
    assert torch.allclose(final[0, 0], s, rtol=1e-12)


def test_strong_decay_stays_finite():
    """exp of accumulated decay underflows, its inverse would overflow."""
    (q, k, v, g, beta), cu_seqlens, _ = inputs([100, 7], dtype=torch.float32)
    g = (g - 50).detach().requires_grad_()
    results = outputs_and_gradients(chunked_gated_delta_rule, [q, k, v, g, beta], cu_seqlens, None)
    assert all(t.isfinite().all() for t in results)


def test_steps_continue_a_prefill():
    tensors, cu_seqlens, _ = inputs([9, 9, 9])
    whole, _ = gated_delta_rule(*tensors, cu_seqlens)
    first = [t.unflatten(0, (3, 9))[:, :5].flatten(0, 1) for t in tensors]
    _, state = gated_delta_rule(*first, torch.arange(4, dtype=torch.int32) * 5, final_state=True)
    for t in range(5, 9):
        row = [x.unflatten(0, (3, 9))[:, t] for x in tensors]
        output, state = gated_delta_step(*row, state)
        assert (output - whole.unflatten(0, (3, 9))[:, t]).abs().max() < 1e-12


def test_segments_do_not_mix():
    tensors, cu_seqlens, _ = inputs([4, 20, 6])
    together, _ = gated_delta_rule(*tensors, cu_seqlens)
    alone, _ = gated_delta_rule(*(t[4:24] for t in tensors), torch.tensor([0, 20]))
    assert (together[4:24] - alone).abs().max() < 1e-14
    poisoned = [t.detach().clone() for t in tensors]
    for t in poisoned:
        t[:4] = torch.nan
    clean, _ = gated_delta_rule(*poisoned, cu_seqlens)
    assert torch.equal(clean[4:], together[4:].detach())


def test_bf16_keeps_its_dtype_and_an_fp32_state():
    tensors, cu_seqlens, _ = inputs([30, 2], dtype=torch.bfloat16)
    output, state = gated_delta_rule(*tensors, cu_seqlens, final_state=True)
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32


@pytest.mark.parametrize("lengths", [[0, 1, 64, 0, 65, 200, 0], [63], [0, 0], [128, 128]], ids=str)
def test_chunk_table_of_the_kernel(lengths):
    """Fixed size: the chunks in order, then entries past the end of the last segment."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    table = chunk_table(cu_seqlens, sum(lengths)).tolist()
    expected = [[s, c] for s, length in enumerate(lengths) for c in range(-(-length // CHUNK))]
    assert table[: len(expected)] == expected
    assert len(table) == sum(lengths) // CHUNK + len(lengths)
    for segment, chunk in table[len(expected) :]:
        assert chunk * CHUNK >= lengths[segment]


def test_where_norm_and_gate_are_part_of_the_kernels(monkeypatch):
    narrow, wide = torch.zeros(3, 1, 128), torch.zeros(3, 1, 129)
    with torch.no_grad():
        assert not fuses_norm(narrow, narrow)
    monkeypatch.setattr(gated_delta, "has_kernels", lambda tensor: True)
    assert not fuses_norm(narrow, narrow)  # gradients go through the operators
    with torch.no_grad():
        assert fuses_norm(narrow, narrow) and not fuses_norm(narrow, wide)
        with by_fla():
            assert not fuses_norm(narrow, narrow)
