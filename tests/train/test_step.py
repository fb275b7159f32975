"""The step: its guard, and on a GPU the recorded step against the one launched kernel by kernel."""

import pytest
import torch

from mol.model.config import CTMoELayer, DenseLayer, ModelConfig, Rank1FFN, SplitLayer
from mol.model.transformer import LanguageModel
from mol.plan.spec import OptimSpec
from mol.train.guard import SPIKE, Guard
from mol.train.step import EAGER_STEPS, TrainStep

CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def judged(losses, norms=None):
    """(guard, which steps failed)."""
    guard = Guard(CPU)
    norms = norms or [1.0] * len(losses)
    failed = [
        guard.judge(torch.tensor(loss), torch.tensor(norm)).item()
        for loss, norm in zip(losses, norms, strict=True)
    ]
    return guard, failed


def test_noise_and_a_lone_spike_pass():
    losses = [10.0, 9.0, 9.5, 8.0, 8.9, 7.0, 12.0, 7.1, 7.0, 6.8]
    guard, failed = judged(losses)
    assert not any(failed)
    guard.check()
    mean = losses[0]
    for loss in losses[1:]:
        mean += 0.1 * (loss - mean)
    assert guard.mean.item() == pytest.approx(mean) and guard.seen.item() == len(losses)


def test_a_loss_that_stays_high_fails_within_a_few_steps_and_for_good():
    guard, failed = judged([4.0] * 20 + [8.0] * 6 + [4.0] * 3)
    assert failed == [0.0] * 22 + [1.0] * 7
    with pytest.raises(FloatingPointError, match=rf"step 23: loss 8 .* {SPIKE:g} above 4, grad"):
        guard.check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_at_once(bad):
    guard, failed = judged([4.0, bad, 4.0])
    assert failed == [0.0, 1.0, 1.0]
    with pytest.raises(FloatingPointError, match=rf"step 2: loss {bad}, gradient norm 1$"):
        guard.check()
    guard, failed = judged([4.0, 4.0], [1.0, bad])
    assert failed == [0.0, 1.0]
    with pytest.raises(FloatingPointError, match=rf"step 2: loss 4, gradient norm {bad}$"):
        guard.check()


def test_a_guard_goes_on_where_it_was():
    whole, _ = judged([5.0, 4.0, 3.0, 3.5])
    first, _ = judged([5.0, 4.0])
    second = Guard(CPU)
    second.load_state_dict(first.state_dict())
    for loss in (3.0, 3.5):
        second.judge(torch.tensor(loss), torch.tensor(1.0))
    assert second.state_dict() == whole.state_dict()


LAYERS = {
    "dense": DenseLayer(n_heads=4, d_ff=160),
    "full": SplitLayer(d_thin=64, n_heads=2, n_blocks=5, top_k=3, coverage="full", d_ff=96),
    "hybrid": SplitLayer(
        d_thin=64, n_heads=2, n_blocks=6, n_shared=1, top_k=2, attention="deltanet", d_ff=96
    ),
    "rank-1": CTMoELayer(n_heads=4, ffn=Rank1FFN(n_experts=64, top_k=6, routing_dim=8)),
}


def make(device, layer="hybrid", replayed=True, bf16=False, vocab_size=301, **optim):
    torch.manual_seed(3)
    config = ModelConfig(vocab_size=vocab_size, d_model=128, n_layers=2, layer=LAYERS[layer])
    with torch.device(device):
        model = LanguageModel(config)
    settings = {"steps": 20, "batch_size": 8, "lr": 3e-3, "warmup_steps": 2} | optim
    return TrainStep(model, OptimSpec(**settings), 31, device, bf16, replayed)


def batches(step, number):
    generator = torch.Generator().manual_seed(number)
    optim, vocab_size = step.optim, step.model.config.vocab_size
    found = []
    for _ in range(optim.accumulate):
        shape = optim.batch_size // optim.accumulate, 32
        ids = torch.randint(vocab_size, shape, generator=generator)
        real = torch.rand(shape[0], 31, generator=generator) < 0.8
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), real))
    return found


def test_a_failed_step_leaves_weights_and_moments_as_they_are():
    step = make(CPU)
    for number in range(3):
        step(batches(step, number), 1e-3)
    before = [p.detach().clone() for p in step.model.parameters()]
    counts = [t.clone() for t in step.optimizer.steps.values()]
    with torch.no_grad():
        step.guard.mean.fill_(-5.0)  # to its running mean this loss is a spike
        step.guard.lowest.fill_(-9.0)
    for number in (3, 4):
        step(batches(step, number), 1e-3)
    with pytest.raises(FloatingPointError, match="step 4: loss .* above -9"):
        step.figures()
    assert all(map(torch.equal, step.model.parameters(), before))
    assert all(map(torch.equal, step.optimizer.steps.values(), counts))


def run(step, steps=20):
    """Every figure of every step, then weights and moments."""
    figures = []
    for number in range(steps):
        step(batches(step, number), 1e-3)
        figures.append(step.figures())
    state = {f"weight {name}": p.detach() for name, p in step.model.named_parameters()}
    for kind, tensors in step.optimizer.state_dict().items():
        state |= {f"{kind} {name}": t for name, t in tensors.items()}
    return figures, {name: t.clone() for name, t in state.items()}


@pytest.mark.parametrize(
    ("layer", "optim"),
    [
        *((layer, {}) for layer in LAYERS),
        ("hybrid", {"accumulate": 2}),
        ("dense", {"checkpoint_activations": True}),
    ],
)
def test_copies_of_the_weights_are_what_autocast_makes_of_them(layer, optim):
    """Bit for bit: figures, weights and moments; afterwards the model holds its own weights."""
    copied = make(CPU, layer, bf16=True, **optim)
    own = list(copied.model.parameters())
    autocast = make(CPU, layer, bf16=True, **optim)
    assert len(copied.copies.places) >= 4 * 2
    autocast.copies = None
    found, expected = run(copied, 2), run(autocast, 2)
    assert found[0] == expected[0]
    different = [name for name, t in found[1].items() if not torch.equal(t, expected[1][name])]
    assert not different
    assert all(a is b for a, b in zip(own, copied.model.parameters(), strict=True))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in own)


@NEEDS_GPU
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "optim",
    [{}, {"accumulate": 2, "pad_targets": "masked"}, {"checkpoint_activations": True}],
    ids=["plain", "micro-batches", "recomputed"],
)
def test_on_a_gpu_the_recorded_step_is_the_eager_one(layer, optim):
    """Bit for bit, 20 steps: same kernels, none with atomics whose order is left open."""
    gpu = torch.device("cuda")
    recorded = make(gpu, layer, True, bf16=True, **optim)
    found = run(recorded)
    assert recorded.graph is not None and recorded.done > EAGER_STEPS
    expected = run(make(gpu, layer, False, bf16=True, **optim))
    assert found[0] == expected[0]
    different = [name for name, t in found[1].items() if not torch.equal(t, expected[1][name])]
    assert not different


@NEEDS_GPU
def test_on_a_gpu_a_recorded_step_survives_other_shapes_in_between():
    """What a graph reads must not be freed: plans of other batches fill the cache meanwhile."""
    gpu = torch.device("cuda")
    step, undisturbed = (make(gpu, "full", bf16=True) for _ in range(2))
    expected = run(undisturbed, 12)
    for number in range(12):
        step(batches(step, number), 1e-3)
        if number > EAGER_STEPS:
            with torch.no_grad():
                for length in range(20, 40):
                    step.model(torch.zeros(number, length, dtype=torch.int64, device=gpu))
    assert step.figures() == expected[0][-1]


@NEEDS_GPU
def test_on_a_gpu_the_loss_of_a_wide_vocabulary_learns():
    """An odd vocabulary, whose products are padded; one batch over and over."""
    step = make(torch.device("cuda"), "dense", bf16=True, vocab_size=50257)
    again = batches(step, 0)
    step(again, 1e-3)
    first = step.figures()[0]
    for _ in range(60):
        step(again, 1e-3)
    assert first == pytest.approx(torch.tensor(50257.0).log().item(), abs=0.3)
    assert step.figures()[0] < first - 1
