"""Full-width Gated DeltaNet: weights, equation, start values, cache."""

import pytest
import torch
import torch.nn.functional as F

from mol.model.delta import GatedDeltaNet


def layer(width=12, heads=2):
    torch.manual_seed(0)
    delta = GatedDeltaNet(width, heads).double()
    delta.init_weights(0.4, 0.4)
    torch.nn.init.normal_(delta.norm, 1, 0.3)
    return delta


def plain(delta, x_TM, heads=2):
    """Row by row, straight from the layer's definition."""
    length, width = x_TM.shape
    d = width // heads
    projected = x_TM @ delta.qkvg_ab
    qkv, gate = projected[:, : 3 * width], projected[:, 3 * width : 4 * width]
    a, b = projected[:, 4 * width : 4 * width + heads], projected[:, 4 * width + heads :]
    state = x_TM.new_zeros(heads, d, d)
    rows = []
    for t in range(length):
        taps = [delta.filters[:, 3 - j] * qkv[t - j] for j in range(4) if t >= j]
        q, k, v = F.silu(sum(taps)).view(3, heads, d).unbind(0)
        heads_out, states = [], []
        for h in range(heads):
            q_h = q[h] / (q[h] @ q[h] + 1e-6).sqrt()
            k_h = k[h] / (k[h] @ k[h] + 1e-6).sqrt()
            decay = torch.exp(-delta.decay_log[h].exp() * F.softplus(a[t, h] + delta.dt_bias[h]))
            s = state[h] * decay
            s = s + torch.outer(k_h, torch.sigmoid(b[t, h]) * (v[h] - k_h @ s))
            o = q_h @ s / d**0.5
            states.append(s)
            heads_out.append(o / (o.square().mean() + 1e-5).sqrt() * delta.norm)
        state = torch.stack(states)
        rows.append((torch.cat(heads_out) * F.silu(gate[t])) @ delta.out)
    return torch.stack(rows)


@pytest.mark.parametrize("batch, length", [(1, 1), (1, 3), (2, 19)])
def test_outputs_and_gradients(batch, length):
    delta = layer()
    x = torch.randn(batch, length, 12, dtype=torch.float64, requires_grad=True)
    loss = torch.randn(batch, length, 12, dtype=torch.float64)
    wanted = [x, *delta.parameters()]
    found, expected = delta(x, None), torch.stack([plain(delta, row) for row in x])
    results = [[y, *torch.autograd.grad((y * loss).sum(), wanted)] for y in (found, expected)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 8])
@torch.no_grad()
def test_decode_equals_prefill(prompt):
    delta, x = layer(), torch.randn(3, 11, 12, dtype=torch.float64)
    expected, cache = delta(x, None), delta.new_cache(3, 20)
    if prompt:
        delta(x[:, :prompt], None, cache)
    for t in range(prompt, 11):
        y = delta.step(x[:, t], None, t, cache)
        assert (y - expected[:, t]).abs().max() < 1e-10


@pytest.mark.parametrize("width, extra", [(256, 70_728), (320, 109_514), (512, 276_560)])
def test_parameter_count(width, extra):
    """5 d^2 + 2 d H + 12 d + 64 + 2 H at head width 64: what it adds to bias-free softmax."""
    heads = width // 64
    count = sum(p.numel() for p in GatedDeltaNet(width, heads).parameters())
    assert count == 5 * width**2 + 2 * width * heads + 12 * width + 64 + 2 * heads
    assert count - 4 * width**2 == extra


def test_start_values():
    torch.manual_seed(0)
    delta = GatedDeltaNet(64, 32, stack=50)
    rate, step = delta.decay_log.exp(), F.softplus(delta.dt_bias)
    assert 0 < rate.min() < 0.2 and 15.8 < rate.max() <= 16
    assert abs(rate.mean() - 8) < 0.5
    assert 9.9e-4 < step.min() < 1.1e-3 and 0.09 < step.max() < 0.101
    assert abs(step.log10().mean() + 2) < 0.05  # log-uniform: the median is 1e-2
