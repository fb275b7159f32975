"""Training: bit-identical restarts, schedule, decay groups, refusals."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tiny_corpus import LAYER, tiny_corpus

from mol.base import UserError, sha256_file
from mol.cli import main
from mol.data.config import FurtherText
from mol.data.packing import prepare
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel
from mol.ops import selfcheck, trusted
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec
from mol.store.record import load_record
from mol.train.checkpoint import STATE, WEIGHTS, load_state, load_weights
from mol.train.loop import Trainer, train
from mol.train.optimizer import is_decayed
from mol.train.run import execute
from mol.train.schedule import lr_at

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return tiny_corpus(folder), folder / "corpus"


def make_spec(data, layer=LAYER, **optim):
    settings = {"steps": 20, "batch_size": 4, "lr": 3e-3, "warmup_steps": 2} | optim
    return TrainSpec(
        scale="smoke",
        condition="tiny",
        model=ModelConfig(vocab_size=300, d_model=32, n_layers=2, layer=layer),
        data=data,
        seq_len=15,
        optim=OptimSpec(**settings),
        evaluation=EvalSpec(every=5, curve_sequences=4, final_sequences=8),
        seed=7,
    )


def weights_of(trained):
    return {name: p.clone() for name, p in trained.model.state_dict().items()}


def rows_of(trained):
    return [tuple(row) for row in trained.curve]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_twenty_steps_equal_ten_a_restart_and_ten(corpus, tmp_path, accumulate):
    data, folder = corpus
    spec = make_spec(data, accumulate=accumulate)
    whole = train(spec, folder, tmp_path / "whole", CPU)
    first = train(spec, folder, tmp_path / "parts", CPU, stop_after=10)
    assert first.steps_done == 10 and (tmp_path / "parts" / STATE).is_file()
    saved = load_state(tmp_path / "parts", spec.run_id)
    assert saved["batches"]["position"] == 10 * 4, "what was read ahead was not taken"
    assert saved["guard"]["seen"] == 10
    torch.manual_seed(999)  # a restart must not depend on what ran in between
    second = train(spec, folder, tmp_path / "parts", CPU)
    assert rows_of(second) == rows_of(whole)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    assert second.epochs == whole.epochs
    points = [(step, name) for step, _, name, _ in second.curve]
    assert len(points) == len(set(points)), "one value a step"
    rates = [value for _, _, name, value in second.curve if name == "lr"]
    assert rates == [lr_at(step, spec.optim) for step in range(20)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_twenty_steps_equal_ten_a_restart_and_ten(corpus, tmp_path):
    """Bit for bit, though the restarted process launches its first steps kernel by kernel."""
    data, folder = corpus
    gpu, wide = torch.device("cuda"), LAYER.model_copy(update={"d_thin": 64, "d_ff": 96})
    spec = make_spec(data, wide)
    model = spec.model.model_copy(update={"d_model": 128})
    spec = spec.model_copy(update={"model": model, "precision": "bf16"})
    whole = train(spec, folder, tmp_path / "whole", gpu)
    train(spec, folder, tmp_path / "parts", gpu, stop_after=10)
    second = train(spec, folder, tmp_path / "parts", gpu)
    assert rows_of(second) == rows_of(whole)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_a_run_that_goes_on_elsewhere_says_so_and_takes_no_speed_along(corpus, tmp_path):
    data, folder = corpus
    spec = make_spec(data, steps=6)
    train(spec, folder, tmp_path, CPU, stop_after=2)
    state = torch.load(tmp_path / STATE, weights_only=True)
    assert state["steady"][0] == 2 and len(state["machines"]) == 1
    torch.save(state | {"machines": ["8 x Made-up GPU"], "steady": (10**9, 1.0)}, tmp_path / STATE)
    train(spec, folder, tmp_path, CPU, stop_after=4)
    record = execute(spec, folder, tmp_path, CPU)
    assert [n for n in record.notes if "some of" in n] == ["some of the steps on 8 x Made-up GPU"]
    assert next(m.value for m in record.metrics if m.name == "train_steps_per_s") < 1e6


def test_a_seed_fixes_every_bit_and_another_seed_does_not(corpus, tmp_path):
    data, folder = corpus
    spec = make_spec(data, steps=6)
    a, b = (train(spec, folder, tmp_path / name, CPU) for name in "ab")
    assert rows_of(a) == rows_of(b)
    other = train(spec.model_copy(update={"seed": 8}), folder, tmp_path / "c", CPU)
    assert rows_of(a) != rows_of(other)


def test_loss_falls_and_curve_has_one_value_a_step(corpus, tmp_path):
    data, folder = corpus
    trained = train(make_spec(data, steps=40), folder, tmp_path, CPU)
    points = {}
    for step, tokens, name, value in trained.curve:
        assert (step, name) not in points
        assert tokens == step * 4 * 15
        points[step, name] = value
    assert points[40, "validation_nll"] < points[0, "validation_nll"] - 0.5
    assert points[0, "validation_nll"] == pytest.approx(math.log(300), abs=0.2)


def test_masked_and_counted_pad_targets_train_differently(corpus, tmp_path):
    data, folder = corpus
    counted = train(make_spec(data, steps=4), folder, tmp_path / "a", CPU)
    masked = train(make_spec(data, steps=4, pad_targets="masked"), folder, tmp_path / "b", CPU)
    losses = [
        [value for _, _, name, value in run.curve if name == "train_nll"]
        for run in (counted, masked)
    ]
    assert losses[0] != losses[1]


def test_accumulated_micro_batches_equal_one_batch(corpus):
    data, folder = corpus
    layer = DenseLayer(n_heads=4, d_ff=48)
    one = Trainer(make_spec(data, layer), folder, CPU)
    four = Trainer(make_spec(data, layer, accumulate=4), folder, CPU)
    for _ in range(3):
        assert one.train_step() == pytest.approx(four.train_step(), rel=1e-5)
    for (name, a), b in zip(one.model.named_parameters(), four.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def test_a_run_leaves_a_checked_record_a_curve_and_weights(corpus, tmp_path):
    data, folder = corpus
    spec = make_spec(data)
    record = execute(spec, folder, tmp_path, CPU)
    assert load_record(tmp_path / "record.json") == record
    assert json.loads((tmp_path / "config.json").read_text()) == spec.model_dump(mode="json")
    assert not (tmp_path / STATE).exists()
    found = {(m.name, m.protocol.split, m.protocol.pad) for m in record.metrics if m.protocol}
    for split in ("validation", "test"):
        for pad in ("masked", "pad_counted"):
            assert ("ppl", split, pad) in found
        assert ("bits_per_byte", split, "masked") in found
    values = {m.name: m.value for m in record.metrics}
    assert values["epochs"] > 0 and values["train_tokens_per_s"] > 0
    assert values["coverage"] == pytest.approx(2 / 3)
    table = pq.read_table(tmp_path / "curve.parquet").to_pylist()
    assert {row["name"] for row in table} >= {"train_nll", "validation_nll", "lr", "grad_norm"}
    sha = record.provenance.data["tokenizer_sha256"]
    load_weights(tmp_path, LanguageModel(spec.model), sha)
    with pytest.raises(UserError, match="trained with tokenizer"):
        load_weights(tmp_path, LanguageModel(spec.model), "0" * 64)


def test_a_run_is_scored_on_further_texts_and_names_every_text(corpus, tmp_path):
    data, _ = corpus
    (tmp_path / "more.txt").write_text("\n\n".join(f"w{i} x{i % 5} " * 9 for i in range(40)))
    source = data.source.model_copy(
        update={"texts": {"more": FurtherText(file=str(tmp_path / "more.txt"))}}
    )
    data = data.model_copy(update={"source": source})
    meta = prepare(data, tmp_path / "corpus")
    record = execute(make_spec(data, steps=3), tmp_path / "corpus", tmp_path / "run", CPU)
    found = {m.name: m for m in record.metrics if m.labels.get("text") == "more"}
    assert set(found) == {"text_nll", "text_bits_per_byte"}
    assert 3 < found["text_nll"].value < 7 and found["text_nll"].stderr > 0
    assert found["text_nll"].n > 0 and found["text_nll"].labels["pad"] == "masked"
    names = record.provenance.data
    assert names["more_text"] == f"more.txt {sha256_file(tmp_path / 'more.txt')}"
    assert names["train_text"] == f"text.txt {sha256_file(Path(source.train))}"
    assert names["more_sha256"] == meta.splits["more"].sha256


def test_broken_and_foreign_checkpoints_are_refused_by_name(corpus, tmp_path):
    data, folder = corpus
    spec = make_spec(data)
    train(spec, folder, tmp_path, CPU, stop_after=2)
    other = spec.model_copy(update={"seed": 99})
    with pytest.raises(UserError, match=f"{STATE}: belongs to run"):
        train(other, folder, tmp_path, CPU)
    whole = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{STATE}: unreadable checkpoint"):
        train(spec, folder, tmp_path, CPU)
    (tmp_path / WEIGHTS).write_bytes(b"not weights")
    with pytest.raises(UserError, match=f"{WEIGHTS}: unreadable weights"):
        load_weights(tmp_path, LanguageModel(spec.model), "0" * 64)


def test_a_loss_that_is_not_finite_stops_with_the_checkpoint_kept(corpus, tmp_path):
    data, folder = corpus
    spec = make_spec(data)
    train(spec, folder, tmp_path, CPU, stop_after=4)
    state = torch.load(tmp_path / STATE, weights_only=True)
    state["model"]["embedding.weight"][:] = float("nan")
    torch.save(state, tmp_path / STATE)
    kept = (tmp_path / STATE).read_bytes()
    with pytest.raises(UserError, match=r"step 5: loss nan.*last good checkpoint"):
        train(spec, folder, tmp_path, CPU)
    assert (tmp_path / STATE).read_bytes() == kept


def test_a_run_that_diverges_stops_with_exit_code_2_and_its_last_good_checkpoint(
    corpus, tmp_path, capsys
):
    data, _ = corpus
    spec = make_spec(data, lr=1.0, warmup_steps=15)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    words = ["--spec", str(tmp_path / "spec.json"), "--results", str(tmp_path), "--quiet"]
    assert main(["train", *words, "--device", "cpu", "--checkpoint-every", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    failed = int(re.search(r"step (\d+): loss \S+ lifts its running mean more than 1", error)[1])
    folder = tmp_path / "runs" / "smoke" / spec.run_id
    assert f"The last good checkpoint is {folder / STATE}; lower optim.lr" in error
    kept = load_state(folder, spec.run_id)
    assert kept["step"] == failed - 1 >= 2
    losses = [value for _, _, name, value in kept["curve"] if name == "train_nll"]
    assert all(math.isfinite(loss) for loss in losses) and len(losses) == failed - 1
    assert not (folder / "record.json").exists() and not (folder / WEIGHTS).exists()


def test_training_refuses_a_gpu_whose_kernels_are_wrong(corpus, tmp_path, monkeypatch):
    """A kernel that is off by a little, inside the real self-check, run here on the CPU; of its
    comparisons those that call that kernel."""
    data, folder = corpus
    right, every = selfcheck.grouped_mm, selfcheck._comparisons

    def products(*where):
        return (case for case in every(*where) if case[0].startswith("grouped product 48"))

    monkeypatch.setattr(selfcheck, "_comparisons", products)
    monkeypatch.setattr(selfcheck, "grouped_mm", lambda x, w, offs: 1.05 * right(x, w, offs))
    monkeypatch.setattr(trusted, "run_checks", lambda device: selfcheck.run_checks("cpu"))
    monkeypatch.setattr(trusted, "_key", lambda device: "a GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="self-check failed.*grouped product 48 to 64"):
        execute(make_spec(data), folder, tmp_path, torch.device("cuda"))
    assert not list(tmp_path.iterdir()), "neither a run nor a remembered pass"


def test_schedule_warms_up_and_ends_at_its_floor():
    optim = OptimSpec(steps=100, batch_size=1, lr=2.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [lr_at(step, optim) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == 2.0 and rates[10] == 2.0
    assert rates[55] == pytest.approx(1.1)
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_vectors_do_not_decay_even_when_stacked(corpus):
    data, _ = corpus
    model = LanguageModel(make_spec(data).model)
    for name, parameter in model.named_parameters():
        vector = any(word in name for word in ("norm", "bias", "decay_log", "dt_bias"))
        assert is_decayed(name, parameter) == (not vector), name


def test_optimizer_equals_torch_adamw(corpus):
    data, folder = corpus
    ours = Trainer(make_spec(data), folder, CPU)
    theirs = Trainer(make_spec(data), folder, CPU)
    optim = ours.spec.optim
    groups = {True: [], False: []}
    for name, parameter in theirs.model.named_parameters():
        groups[is_decayed(name, parameter)].append(parameter)
    reference = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": optim.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        betas=optim.betas,
    )

    def reference_step(lr, skipped):
        assert skipped == 0
        for group in reference.param_groups:
            group["lr"] = lr.item()
        reference.step()

    theirs.update.optimizer.step = reference_step
    for _ in range(5):
        assert ours.train_step() == pytest.approx(theirs.train_step(), rel=1e-5)
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def test_a_run_starts_without_importing_the_compiler():
    code = (
        "import sys, torch, mol.train.command; from mol.train.optimizer import AdamW;"
        "from mol.model.config import *; from mol.model.transformer import LanguageModel;"
        "from mol.plan.spec import OptimSpec;"
        "layer = SplitLayer(d_thin=16, n_heads=2, n_blocks=3, n_shared=1, top_k=1, d_ff=8,"
        " attention='deltanet');"
        "m = LanguageModel(ModelConfig(vocab_size=300, d_model=16, n_layers=1, layer=layer));"
        "o = AdamW(m, OptimSpec(steps=2, batch_size=1, lr=1e-3, warmup_steps=1));"
        "m(torch.zeros(1, 5, dtype=torch.long)).hidden.sum().backward();"
        "o.step(torch.tensor(1e-3), torch.tensor(0.0));"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
