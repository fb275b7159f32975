"""A captured call repeats the function on new inputs, and state on the device advances."""

import copy

import pytest
import torch

from mol.bench.common import layers_compiled
from mol.bench.decode import filled_cache, graphed_step
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.transformer import LanguageModel
from mol.ops.graph import Captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
DEVICE = torch.device("cuda")
LAYERS = {
    "dense": DenseLayer(n_heads=4, d_ff=512),
    "mol": SplitLayer(
        d_thin=128, n_heads=2, n_blocks=6, n_shared=1, top_k=2, d_ff=256, attention="deltanet"
    ),
    "mol-softmax": SplitLayer(d_thin=128, n_heads=2, n_blocks=6, top_k=2, d_ff=256),
}


def test_a_replay_computes_on_the_new_inputs():
    total = torch.zeros(3, device=DEVICE)

    def function(x):
        total.add_(x)
        return 2 * x

    captured = Captured(function, torch.ones(3, device=DEVICE))
    total.zero_()
    for value in (1.0, 5.0):
        given = torch.full((3,), value, device=DEVICE)
        assert torch.equal(captured(given), 2 * given)
    assert total.tolist() == [6.0, 6.0, 6.0]
    with pytest.raises(ValueError, match="captured with 1"):
        captured()
    with pytest.raises(ValueError, match="float64"):
        captured(torch.ones(3, device=DEVICE, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_graphed_steps_are_the_eager_ones(kind, compiled):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=96, d_model=256, n_layers=3, layer=LAYERS[kind], init_std=0.1)
    model = LanguageModel(config).to(DEVICE, torch.bfloat16)
    eager = filled_cache(model, batch=2, context=40, room=12)
    ids_CB = torch.randint(96, (6, 2), device=DEVICE)
    held = copy.deepcopy(eager)
    device = DEVICE if compiled else torch.device("cpu")
    with layers_compiled(model, device, step=True):
        step = graphed_step(model, held, ids_CB[0])
    for _ in range(Captured.WARMUP):
        model.step(ids_CB[0], eager)
    for ids_B in ids_CB:
        expected = model.step(ids_B, eager)
        assert (step(ids_B) - expected).norm() <= 0.02 * expected.norm()
    assert held.position.item() == eager.position == 49
