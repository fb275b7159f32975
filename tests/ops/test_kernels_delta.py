"""Kernels of the gated delta rule against the recurrence in fp64: outputs, states, gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")

from mol.ops.gated_delta import naive_gated_delta_rule  # noqa: E402
from mol.ops.kernels import delta_solve  # noqa: E402
from mol.ops.kernels.delta import (  # noqa: E402
    CHUNK,
    delta_rule,
    delta_rule_op,
    gated_delta_rule,
)

recurrence = functools.partial(naive_gated_delta_rule, unit=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates bf16, so one rounding is up to 2^-7 of a value there, and they add up.
# A GPU multiplies fp32 as three TF32 products, which leave out the smallest part.
TOLERANCES = {
    torch.float32: 2e-5 if DEVICE == "cuda" else 3e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2.5e-2,
}


def inputs(lengths, heads=2, width=16, value_width=16, dtype=torch.float32, decay=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(rows, heads, width), dim=-1) for _ in range(2))
    v = draw(rows, heads, value_width)
    g, beta = -decay * draw(rows, heads).abs(), draw(rows, heads).sigmoid()
    state = draw(len(lengths), heads, width, value_width)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    wide = [t.float().to(DEVICE) for t in (g, beta, state)]
    return [*(t.to(dtype).to(DEVICE) for t in (q, k, v)), *wide[:2]], cu_seqlens, wide[2]


def error(found, expected):
    scale = expected.norm()
    return ((found.double() - expected).norm() / (scale if scale else 1)).item()


def results(rule, tensors, cu_seqlens, state):
    """Outputs, last states, and the gradients of a fixed weighting of both."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    wanted = tensors if state is None else [*tensors, state.detach().requires_grad_()]
    outputs = rule(*tensors, cu_seqlens, None if state is None else wanted[-1], True)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for output in outputs:
        # The same numbers for every precision: all of them hold halves.
        weights = torch.randint(-4, 5, output.shape, generator=generator) / 2
        loss = loss + (output * weights.to(output)).sum()
    return [*outputs, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


def compare(tensors, cu_seqlens, state, tolerance):
    found = results(delta_rule, tensors, cu_seqlens, state)
    wide = [t.double() for t in tensors]
    state = None if state is None else state.double()
    expected = results(recurrence, wide, cu_seqlens, state)
    for fast, exact in zip(found, expected, strict=True):
        assert fast.shape == exact.shape
        assert error(fast, exact) <= tolerance


# The interpreter takes a third of a second for a chunk of one head.
LENGTHS = [[0, 64, 0, 65, 1], [0, 0]]
WIDTHS = [(24, 33), (65, 8)]
if DEVICE == "cuda":
    LENGTHS += [[1], [63], [0, 130], [128, 64], [3] * 20, [64] * 3, [1000, 3, 777]]
    WIDTHS += [(16, 16), (8, 8), (32, 64), (64, 64), (128, 128), (20, 128), (128, 1)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths):
    tensors, cu_seqlens, state = inputs(lengths)
    compare(tensors, cu_seqlens, state, TOLERANCES[torch.float32])


@pytest.mark.parametrize("width, value_width", WIDTHS)
def test_widths(width, value_width, monkeypatch):
    """And no initial state, and segments found in several rounds."""
    monkeypatch.setattr(delta_solve, "SEARCHED", 2)
    tensors, cu_seqlens, _ = inputs([0, 2, 0, 0, 66], 1, width, value_width)
    compare(tensors, cu_seqlens, None, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    tensors, cu_seqlens, state = inputs([70], 1, 64, 64, dtype)
    compare(tensors, cu_seqlens, state, TOLERANCES[dtype])
    output, final = delta_rule(*(t[:1] for t in tensors), cu_seqlens.clamp(max=1), None, True)
    assert output.dtype == dtype and final.dtype == torch.float32


def test_the_worst_conditioned_systems():
    """Identical keys. With beta = 1 and no decay T is bidiagonal, sums of many terms that cancel;
    strong decay underflows, and its inverse would overflow."""
    lengths = [66, 20, 20, 66, 20]
    (q, k, v, g, beta), cu_seqlens, state = inputs(lengths, 1)
    k = k[:1].expand_as(k).contiguous()
    kind = torch.repeat_interleave(torch.tensor(lengths)).to(DEVICE)[:, None]
    beta = torch.tensor([1.0, 0.9, 1e-6, 1.0, 0.5], device=DEVICE)[kind]
    g = torch.tensor([0.0, 0.0, 0.0, -50.0, -0.01], device=DEVICE)[kind]
    compare([q, k, v, g, beta], cu_seqlens, state, TOLERANCES[torch.float32])


def test_strong_decay_beside_none():
    (q, k, v, g, beta), cu_seqlens, state = inputs([66], 1, decay=0.0)
    g[::7] = -50
    compare([q, k, v, g, beta], cu_seqlens, state, 1e-4)  # differences of sums of 500 in fp32


def test_rows_past_the_end_and_memory_do_not_leak():
    """New tensors start as NaN, and so do the rows behind the last segment."""
    tensors, cu_seqlens, state = inputs([5, 0, 66], 1)
    clean = results(delta_rule, tensors, cu_seqlens, state)
    longer = [torch.cat([t, torch.full_like(t[:9], torch.nan)]) for t in tensors]

    def poisoned(*args):
        output, final = delta_rule(*args)
        assert output[71:].isnan().all()  # so memory was filled, and nothing was written there
        return output[:71], final

    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    try:
        found = results(poisoned, longer, cu_seqlens, state)
    finally:
        torch.use_deterministic_algorithms(False)
    for fast, exact in zip(found, clean, strict=True):
        assert torch.equal(fast[: exact.shape[0]], exact)


@pytest.mark.parametrize("chosen", [0, 1])
def test_one_of_the_outputs_may_be_unused(chosen):
    tensors, cu_seqlens, state = inputs([2], 1)

    def only(rule):
        return lambda *args: rule(*args)[chosen : chosen + 1]

    wide = [t.double() for t in tensors]
    found = results(only(delta_rule), tensors, cu_seqlens, state)
    expected = results(only(recurrence), wide, cu_seqlens, state.double())
    for fast, exact in zip(found, expected, strict=True):
        assert error(fast, exact) <= TOLERANCES[torch.float32]


def test_a_chunk_has_a_slot_of_its_own():
    """start // 64 + segment: within N // 64 + S, and in order, for any lengths."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths = torch.randint(0, 200, (9,), generator=generator) * torch.randint(
            0, 2, (9,), generator=generator
        )
        starts = (lengths.cumsum(0) - lengths).tolist()
        slots = [
            start // CHUNK + s + c
            for s, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True))
            for c in range(-(-length // CHUNK))
        ]
        assert all(a < b for a, b in zip(slots, slots[1:], strict=False))
        assert not slots or slots[-1] < int(lengths.sum()) // CHUNK + 9


def test_strided_inputs_and_registration():
    tensors, cu_seqlens, state = inputs([3, 1], 1)
    whole = torch.stack(tensors[:3], 1).unbind(1)  # as a projection's parts: rows lie apart
    assert torch.equal(
        delta_rule(*whole, *tensors[3:], cu_seqlens)[0], delta_rule(*tensors, cu_seqlens)[0]
    )
    torch.library.opcheck(
        delta_rule_op.recorded,
        (*(t.requires_grad_() for t in tensors), cu_seqlens, state, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def gated_parts(tensors, blocks):
    """Gate and norm weights: rows of the gate lie apart, NaN between and behind them."""
    rows, heads, width = tensors[2].shape
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(rows, heads * width, generator=generator)
    wide = torch.full((rows + 3, heads * width + 5), torch.nan)
    wide[:rows, : heads * width] = drawn
    gate = wide.to(tensors[2])[:rows, : heads * width]
    return gate, torch.randn(blocks, width, generator=generator).to(DEVICE)


def gated_reference(tensors, cu_seqlens, state, gate, norm, eps):
    o, final = recurrence(*(t.double() for t in tensors), cu_seqlens, state, True)
    lengths = cu_seqlens.diff().view(norm.shape[0], -1).sum(1).long()
    weight = norm.double().repeat_interleave(lengths, 0)[:, None]
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight
    return normed.flatten(1) * F.silu(gate.double()), final


# Segments of each sequence of each block: blocks, then lengths.
GATED = [(3, [0, 70, 0, 0, 5, 64]), (1, [1]), (2, [0, 0])]


@pytest.mark.parametrize("blocks, lengths", GATED, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_norm_and_gate_inside(blocks, lengths, with_state, nan_memory):
    """In several precisions, heads of an odd width, and outputs so small that epsilon counts."""
    for dtype, value_width in ((torch.float32, 12), (torch.bfloat16, 16)):
        tensors, cu_seqlens, state = inputs(lengths, 2, 16, value_width, dtype)
        tensors[2] /= 8
        state = state / 8 if with_state else None
        operands = gated_parts(tensors, blocks)
        found = gated_delta_rule(tensors, cu_seqlens, state, True, *operands, 1e-3)
        wide = None if state is None else state.double()
        expected = gated_reference(tensors, cu_seqlens, wide, *operands, 1e-3)
        assert found[0].dtype == dtype and found[1].dtype == torch.float32
        for fast, exact in zip(found, expected, strict=True):
            assert fast.shape == exact.shape
            assert error(fast, exact) <= TOLERANCES[dtype]


def test_norm_and_gate_leave_rows_past_the_end(nan_memory):
    tensors, cu_seqlens, _ = inputs([3, 2], 1)
    operands = gated_parts(tensors, 2)
    cu_seqlens = cu_seqlens.clamp(max=4)
    output, final = gated_delta_rule(tensors, cu_seqlens, None, False, *operands, 1e-5)
    assert output[:4].isfinite().all() and output[4].isnan().all() and final is None
