"""Full-width softmax attention: weights, equation, cache."""

import pytest
import torch

from mol.model.attention import SoftmaxAttention
from mol.ops.attention import Rope

ROPE = Rope(6)


def layer(width=12, heads=2):
    torch.manual_seed(0)
    attention = SoftmaxAttention(width, heads).double()
    for bias in (attention.qkv_bias, attention.out_bias):
        torch.nn.init.normal_(bias)
    return attention


def plain(attention, x_TM, heads=2):
    """One query and head at a time."""
    length, width = x_TM.shape
    q, k, v = (x_TM @ attention.qkv + attention.qkv_bias).chunk(3, -1)
    q, k, v = (t.view(length, heads, width // heads) for t in (q, k, v))
    q, k = (torch.stack([ROPE(t[i], i, length) for i in range(length)]) for t in (q, k))
    rows = []
    for i in range(length):
        mixed = []
        for head in range(heads):
            scores = k[: i + 1, head] @ q[i, head] / (width // heads) ** 0.5
            mixed.append(scores.softmax(0) @ v[: i + 1, head])
        rows.append(torch.cat(mixed) @ attention.out + attention.out_bias)
    return torch.stack(rows)


@pytest.mark.parametrize("batch, length", [(1, 1), (2, 17)])
def test_outputs_and_gradients(batch, length):
    attention = layer()
    x = torch.randn(batch, length, 12, dtype=torch.float64, requires_grad=True)
    loss = torch.randn(batch, length, 12, dtype=torch.float64)
    wanted = [x, *attention.parameters()]
    found = attention(x, ROPE)
    expected = torch.stack([plain(attention, row) for row in x])
    results = [[y, *torch.autograd.grad((y * loss).sum(), wanted)] for y in (found, expected)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("prompt", [0, 1, 8])
@torch.no_grad()
def test_decode_equals_prefill(prompt):
    attention, x = layer(), torch.randn(3, 11, 12, dtype=torch.float64)
    expected, cache = attention(x, ROPE), attention.new_cache(3, 20)
    cache.keys_SHLd.fill_(torch.nan), cache.values_SHLd.fill_(torch.nan)
    if prompt:
        attention(x[:, :prompt], ROPE, cache)
    for t in range(prompt, 11):
        y = attention.step(x[:, t], ROPE, t, cache)
        assert (y - expected[:, t]).abs().max() < 1e-10


@pytest.mark.parametrize("stack", [None, 5])
def test_parameter_count(stack):
    count = sum(p.numel() for p in SoftmaxAttention(256, 4, stack).parameters())
    assert count == (stack or 1) * (4 * 256**2 + 4 * 256)
