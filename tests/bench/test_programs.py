"""Every program on a small model: all its labelled figures, finite and positive."""

import math

import pytest
import torch

from mol.bench import (
    attention,
    decode,
    dispatch,
    logit_diff,
    prefill,
    train_step,
)
from mol.bench.config import (
    AttentionBench,
    DecodeBench,
    DispatchBench,
    DispatchCase,
    LogitDiffBench,
    PrefillBench,
    TrainStepBench,
)
from mol.model.batched import batched
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.paths import dense_restricted, loop, stages_by
from mol.model.reference import reference_stage
from mol.model.split_stage import SplitStage
from mol.model.transformer import LanguageModel
from mol.ops.attention import Rope
from mol.train.step import TrainStep

CPU = torch.device("cpu")
TIMED = {"device": "cpu", "warmup": 0, "repeats": 2}


def split(**changes) -> SplitLayer:
    return SplitLayer(
        **{"d_thin": 16, "n_heads": 2, "n_blocks": 6, "top_k": 2, "d_ff": 24} | changes
    )


def model(layer) -> ModelConfig:
    return ModelConfig(vocab_size=97, d_model=32, n_layers=2, layer=layer)


MODELS = {
    "dense": model(DenseLayer(n_heads=2, d_ff=48)),
    "dense-delta": model(DenseLayer(n_heads=2, d_ff=48, attention="deltanet")),
    "mol": model(split(n_shared=1, attention="deltanet")),
    "mol-softmax": model(split(n_shared=1)),
}


def figures(outcome, name, *keys):
    """Label values -> metric, every figure checked."""
    found = [m for m in outcome.metrics if m.name == name]
    assert all(math.isfinite(m.value) and m.value > 0 for m in found)
    assert all(m.low <= m.value <= m.high and m.n == 2 for m in found)
    return {tuple(m.labels[key] for key in keys): m for m in found}


def test_prefill_has_a_figure_for_each_model_length_and_path():
    spec = PrefillBench(models=MODELS, lengths=(5, 9), paths=("one_pass", "loop"), **TIMED)
    outcome = prefill.run(spec, CPU, seed=0)
    found = figures(outcome, "prefill_tokens_per_s", "model", "length", "path")
    dense = {(name, length, "dense") for name in ("dense", "dense-delta") for length in (5, 9)}
    routed = {
        (name, length, path)
        for name in ("mol", "mol-softmax")
        for length in (5, 9)
        for path in ("one_pass", "loop")
    }
    assert found.keys() == dense | routed
    assert outcome.notes == []
    backends = {name: {m.labels["attention"] for k, m in found.items() if k[0] == name}
                for name in MODELS}  # fmt: skip
    assert backends.pop("dense-delta") == {"none"}  # no layer of it attends by softmax
    assert all(b <= {"math", "flash", "efficient", "cudnn"} for b in backends.values())
    assert {(m.labels["mode"], m.labels["statistic"]) for m in found.values()} == {
        ("eager", "median")
    }


def test_the_papers_protocol_takes_its_paths_and_means():
    spec = PrefillBench(
        models=MODELS, lengths=(9,), paths=("loop", "batched"), run_as="paper", **TIMED
    )
    outcome = prefill.run(spec, CPU, seed=0)
    found = figures(outcome, "prefill_tokens_per_s", "model", "path")
    assert {path for name, path in found if "mol" in name} == {"loop", "batched"}
    assert {(m.labels["mode"], m.labels["statistic"]) for m in found.values()} == {
        ("eager", "mean")
    }
    # The mean of two times, not of two rates: their harmonic mean.
    assert all(m.value == pytest.approx(2 / (1 / m.low + 1 / m.high)) for m in found.values())


def test_each_back_end_is_timed_or_said_to_be_absent():
    models = {name: MODELS[name] for name in ("dense", "dense-delta")}
    wanted = ("flash", "cudnn", "flash_attn")
    spec = PrefillBench(models=models, lengths=(5, 9), attention=wanted, **TIMED)
    outcome = prefill.run(spec, CPU, seed=0)
    found = figures(outcome, "prefill_tokens_per_s", "model", "attention", "length")
    assert {key for key in found if key[0] == "dense"} == {
        ("dense", "flash", 5), ("dense", "flash", 9)
    }  # fmt: skip
    # Without softmax there is nothing to choose: one figure a length, and no note.
    assert {key for key in found if key[0] == "dense-delta"} == {
        ("dense-delta", "none", 5), ("dense-delta", "none", 9)
    }  # fmt: skip
    assert len(outcome.metrics) == len(found) and len(outcome.notes) == 2
    cudnn, package = (n for n in outcome.notes if n.startswith("dense, "))
    assert cudnn == "dense, dense, cudnn: this back end takes no such attention here"
    assert package.startswith("dense, dense, flash_attn: ")


def test_prefill_without_memory_leaves_a_note_and_the_other_figures(monkeypatch):
    whole = LanguageModel.forward

    def too_long(self, ids_BT, cache=None):
        if ids_BT.shape[1] > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, ids_BT, cache)

    monkeypatch.setattr(LanguageModel, "forward", too_long)
    spec = PrefillBench(models={"dense": MODELS["dense"]}, lengths=(5, 9), **TIMED)
    outcome = prefill.run(spec, CPU, seed=0)
    assert [m.labels["length"] for m in outcome.metrics] == [5]
    assert outcome.notes == ["dense, dense, 9 tokens: out of GPU memory"]


def test_decode_times_every_context_and_the_shortest_without_a_cache():
    spec = DecodeBench(models=MODELS, contexts=(4, 11), batch_size=2, **TIMED)
    outcome = decode.run(spec, CPU, seed=0)
    found = figures(outcome, "decode_ms", "model", "context", "cache")
    assert {m.labels["mode"] for m in outcome.metrics} == {"eager"}
    cases = ((4, True), (4, False), (11, True))
    assert found.keys() == {(name, *case) for name in MODELS for case in cases}


@pytest.mark.parametrize("name", MODELS)
def test_a_filled_cache_has_the_shape_of_one_that_was_computed(name):
    """Same tensors, position and room as after feeding the tokens one by one; shares of the
    routed blocks add up to what the router spreads."""
    torch.manual_seed(0)
    net = LanguageModel(MODELS[name])
    made = decode.filled_cache(net, batch=2, context=10, room=3)
    fed = net.new_cache(2, 13)
    for _ in range(10):
        net.step(torch.randint(97, (2,)), fed)
    assert made.position == fed.position == 10 and made.max_len == 13

    def states(held):
        parts = (held.shared, held.routed) if hasattr(held, "routed") else (held,)
        return [vars(part) for part in parts if part is not None]

    for held, other in zip(made.layers, fed.layers, strict=True):
        for mine, theirs in zip(states(held), states(other), strict=True):
            assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in theirs.items()}
            if "used_S" in mine:
                assert mine["used_S"].sum() == theirs["used_S"].sum()
                assert all(t.abs().sum() > 0 for t in mine.values())
    for _ in range(3):
        assert net.step(torch.randint(97, (2,)), made).isfinite().all()


def test_attention_times_both_kinds_at_every_length():
    spec = AttentionBench(d_model=32, n_heads=2, d_ff=48, batch_size=2, lengths=(8, 20), **TIMED)
    outcome = attention.run(spec, CPU, seed=0)
    found = figures(outcome, "attention_ms", "attention", "length")
    assert {m.labels["mode"] for m in outcome.metrics} == {"eager"}
    assert found.keys() == {(kind, t) for kind in ("softmax", "deltanet") for t in (8, 20)}


@pytest.mark.parametrize("whole", [{}, {"n_layers": 2, "vocab_size": 50, "run_as": "graph"}])
def test_dispatch_times_both_paths_and_their_ratio(whole):
    cases = (DispatchCase(top_k=2, n_blocks=3), DispatchCase(top_k=1, n_blocks=8))
    spec = DispatchBench(
        d_model=32, d_thin=16, n_heads=2, d_ff=24, cases=cases, seq_len=9, batch_size=2, **TIMED,
        **whole,
    )  # fmt: skip
    outcome = dispatch.run(spec, CPU, seed=0)
    times = figures(outcome, "dispatch_ms", "top_k", "n_blocks", "mode", "path")
    ratios = figures(outcome, "dispatch_speedup", "top_k", "n_blocks", "mode")
    assert ratios.keys() == {(2, 3, "eager"), (1, 8, "eager")}
    assert all(m.labels.get("layers") == whole.get("n_layers") for m in ratios.values())
    for case, ratio in ratios.items():
        dense, sparse = times[*case, "dense_restricted"], times[*case, "sparse"]
        assert ratio.value == pytest.approx(dense.value / sparse.value)


def test_train_step_times_each_case_by_the_step_of_training(monkeypatch):
    taken = []
    update = TrainStep.__call__
    monkeypatch.setattr(
        TrainStep, "__call__", lambda step, *args: (taken.append(step), update(step, *args))
    )
    cases = {
        "mol": {"model": MODELS["mol"], "seq_len": 8, "batch_size": 2},
        "dense": {"model": MODELS["dense"], "seq_len": 5, "batch_size": 4, "accumulate": 2,
                  "checkpoint_activations": True},
    }  # fmt: skip
    outcome = train_step.run(TrainStepBench(cases=cases, **TIMED), CPU, seed=0)
    found = figures(outcome, "train_tokens_per_s", "model", "length", "batch", "micro_batches")
    assert found.keys() == {("mol", 8, 2, 1), ("dense", 5, 4, 2)}
    assert {m.labels["mode"] for m in outcome.metrics} == {"eager"}
    assert [m.labels["recomputed"] for m in outcome.metrics] == [False, True]
    assert len(taken) == 4 and taken[-1].model.checkpoint_activations
    assert len(outcome.notes) == 2 and all("no MFU" in note for note in outcome.notes)


ROUTED = model(split(n_blocks=5, top_k=3))


def test_logit_difference_is_rounding_only():
    outcome = logit_diff.run(LogitDiffBench(model=ROUTED, seq_len=21, batch_size=2), CPU, seed=0)
    difference, size = (m.value for m in outcome.metrics)
    assert [m.name for m in outcome.metrics] == ["max_logit_diff", "max_abs_logit"]
    assert 0 <= difference < 1e-5 < 0.1 < size


def test_logit_difference_sees_a_changed_block_in_one_path():
    torch.manual_seed(0)
    net = LanguageModel(ROUTED)
    ids = torch.randint(97, (1, 21))
    clean, _ = logit_diff.largest_difference(net, ids)

    def tampered(stage):
        forward = dense_restricted(stage)

        def other_weights(x_BTD, rope, cache=None, start=0):
            kept = stage.routed.up.detach().clone()
            stage.routed.up.data[2] *= 1.5
            out = forward(x_BTD, rope)
            stage.routed.up.data.copy_(kept)
            return out

        return other_weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_diff, "dense_restricted", tampered)
        changed, _ = logit_diff.largest_difference(net, ids)
    assert clean < 1e-5 and changed > 100 * max(clean, 1e-7)


@pytest.mark.parametrize(
    "layer",
    [
        split(),
        split(n_shared=1, shared_weight="unit"),
        split(n_shared=2, weights_over="all"),
        split(n_blocks=9, top_k=1, divide_by_k=False),
        split(attention="deltanet", n_shared=1),
        split(coverage="full"),
        split(router="none", top_k=6, coverage="full"),
    ],
)
@pytest.mark.parametrize("length", [1, 13])
def test_paths_compute_the_stage(layer, length):
    torch.manual_seed(1)
    stage, rope = SplitStage(layer, 32).double(), Rope(8)
    x_BTD = torch.randn(3, length, 32, dtype=torch.float64)
    expected = reference_stage(stage, x_BTD, rope)
    paths = [loop, batched] + [dense_restricted] * (layer.attention == "softmax")
    _, _, routes = stage(x_BTD, rope)
    for path in paths:
        with torch.no_grad():
            y_BTD, path_balance, path_routes = path(stage)(x_BTD, rope)
        torch.testing.assert_close(y_BTD, expected, rtol=0, atol=1e-12)
        assert path_balance.item() == 0  # no gradients, no loss
        assert routes is None or torch.equal(path_routes, routes)


def test_a_mask_cannot_restrict_a_recurrence():
    with pytest.raises(ValueError, match="softmax"):
        dense_restricted(SplitStage(split(attention="deltanet"), 32))


def test_stages_are_themselves_again_afterwards():
    net = LanguageModel(ROUTED)
    ids = torch.randint(97, (1, 7))
    before = net(ids).hidden
    with pytest.raises(RuntimeError), stages_by(net, loop):
        raise RuntimeError
    assert all("forward" not in vars(layer) for layer in net.layers)
    assert torch.equal(net(ids).hidden, before)
