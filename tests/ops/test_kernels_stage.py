"""A stage computed by the kernels, as on a GPU, against the loop over blocks from the equations."""

import pytest
import torch

pytest.importorskip("triton")

from torch.utils.checkpoint import checkpoint

from mol.model import split_stage
from mol.model.config import SplitLayer
from mol.model.paths import loop
from mol.model.reference import reference_balance, reference_stage
from mol.model.split_stage import SplitStage
from mol.ops import dispatch, gated_delta, glue
from mol.ops.attention import Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = {
    "softmax": dict(n_blocks=5, top_k=3),
    "hybrid": dict(n_blocks=6, n_shared=1, top_k=2, attention="deltanet"),
    "two shared": dict(n_blocks=6, n_shared=2, top_k=1, attention="deltanet", divide_by_k=False),
    "all weights, unit shared": dict(
        n_blocks=5, n_shared=1, top_k=2, weights_over="all", shared_weight="unit"
    ),
    "full": dict(n_blocks=4, top_k=2, coverage="full", attention="deltanet"),
    "uniform": dict(n_blocks=3, top_k=3, coverage="full", router="none"),
    "one block": dict(n_blocks=1, top_k=1, coverage="full"),
}


def make(name, monkeypatch):
    for module in (split_stage, dispatch, gated_delta, glue):
        monkeypatch.setattr(module, "has_kernels", lambda tensor: True)
    torch.manual_seed(0)
    layer = SplitLayer(d_thin=32, n_heads=2, d_ff=24, **LAYERS[name])
    with torch.device(DEVICE):
        stage, rope = SplitStage(layer, 48), Rope(16)
        stage.init_weights(0.3, 0.3)
    return stage, rope


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("length", [1, 21])
def test_outputs_and_all_gradients(name, length, monkeypatch):
    stage, rope = make(name, monkeypatch)
    with torch.device(DEVICE):
        x_BTD = torch.randn(3, length, 48, requires_grad=True)
        toward_BTD = torch.randn(3, length, 48)

    def outcome(y_BTD, balance):
        loss = (y_BTD * toward_BTD).sum() + balance
        leaves = [x_BTD, *stage.parameters()]
        return [y_BTD, *torch.autograd.grad(loss, leaves, materialize_grads=True)]

    y_BTD, balance, _ = stage(x_BTD, rope)
    found = outcome(y_BTD, balance)
    monkeypatch.undo()
    plain_balance = 0.0 if stage.router is None else reference_balance(stage, x_BTD)
    expected = outcome(reference_stage(stage, x_BTD, rope), plain_balance)
    names = ["y", "x", *dict(stage.named_parameters())]
    for what, mine, plain in zip(names, found, expected, strict=True):
        scale = plain.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(mine, plain, rtol=0, atol=2e-5 * scale, msg=what)


@pytest.mark.parametrize("name", ["softmax", "hybrid"])
def test_recomputed_activations_change_nothing(name, monkeypatch):
    """Recomputation gives each saved tensor out once: no kernel may ask for it again."""
    stage, rope = make(name, monkeypatch)
    x_BTD = torch.randn(2, 9, 48, device=DEVICE, requires_grad=True)

    def gradients(run):
        y_BTD, balance, _ = run(x_BTD, rope)
        return torch.autograd.grad(y_BTD.square().sum() + balance, [x_BTD, *stage.parameters()])

    kept = gradients(stage)
    recomputed = gradients(lambda *inputs: checkpoint(stage, *inputs, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@torch.no_grad()
def test_block_by_block(monkeypatch):
    """A plan of some tokens names rows that the kernels, which walk over all tokens, never see."""
    stage, rope = make("hybrid", monkeypatch)
    x_BTD = torch.randn(2, 19, 48, device=DEVICE)
    found = loop(stage)(x_BTD, rope)[0]
    monkeypatch.undo()
    torch.testing.assert_close(found, reference_stage(stage, x_BTD, rope), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hybrid", "full"])
def test_prompts_and_the_caches_they_fill(name, monkeypatch):
    """Without gradients, where other kernels run: a prompt into an empty cache, and more of it."""
    stage, rope = make(name, monkeypatch)
    x_BTD = torch.randn(2, 87, 48, device=DEVICE)

    def prompted(first=70):
        cache = stage.new_cache(2, 87)
        outputs = [stage(x_BTD, rope)[0], stage(x_BTD[:, :first], rope, cache)[0]]
        outputs.append(stage(x_BTD[:, first:], rope, cache, first)[0])
        parts = [part for part in (cache.shared, cache.routed) if part is not None]
        return outputs, [held for part in parts for held in vars(part).values()]

    outputs, held = prompted()
    monkeypatch.undo()
    plain_outputs, plain_held = prompted()
    for mine, plain in zip([*outputs, *held], [*plain_outputs, *plain_held], strict=True):
        scale = plain.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(mine, plain, rtol=0, atol=2e-5 * scale)
