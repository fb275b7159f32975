"""What is left to run, and what it costs by the speeds that a GPU measured."""

import json
import math

import duckdb
import pytest
from synthetic import H200, record_of, write_run, write_train

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.plan.spec import BenchSpec
from mol.report.view import View
from mol.store.ingest import build
from mol.store.record import Metric


@pytest.fixture
def ask(tmp_path):
    def ask(sql):
        build(tmp_path / "db", tmp_path / "runs", tmp_path / "none", PAPER)
        with duckdb.connect(tmp_path / "db", read_only=True) as database:
            return database.execute(sql).fetchall()

    return ask


def test_runs_of_a_scale_that_was_begun_are_listed_with_hours_from_a_benchmark(tmp_path, ask):
    specs = [p.spec for p in plan("proxy") if p.spec.kind == "train"]
    of = {spec.condition: spec for spec in reversed(specs)}
    write_train(tmp_path / "runs", of["mol-top3"], math.log(30), hardware=H200)
    model, length = of["fineweb-dense-98m"].model, of["fineweb-dense-98m"].seq_len
    case = {"model": model, "seq_len": length, "batch_size": 32}
    program = {"program": "train_step", "cases": {"fineweb-dense-98m": case}}
    bench = BenchSpec(scale="proxy", condition="train-step", bench=program)
    speed = Metric(
        name="train_tokens_per_s", value=800_000.0, unit="token/s",
        labels={"model": "fineweb-dense-98m", "length": length},
    )  # fmt: skip
    write_run(tmp_path / "runs", record_of(bench, [speed], hardware=H200))
    found = {
        (kind, condition, seed): (json.loads(experiments), hours, gpu)
        for kind, condition, seed, experiments, hours, gpu in ask(
            "SELECT kind, condition, seed, experiments, gpu_hours, gpu FROM not_run "
            "WHERE scale = 'proxy'"
        )
    }
    assert len(found) == len(specs) - 1 + 3 and ("train", "mol-top3", 42) not in found
    hours = 65_536_000 / 800_000 / 3600
    wanted = (["E10", "E12"], pytest.approx(hours), "NVIDIA H200")
    assert found["train", "fineweb-dense-98m", 42] == wanted
    # Another seed costs what the first did; 5e3 tokens a second are synthetic's.
    assert found["train", "mol-top3", 137][1] == pytest.approx(81_600_000 / 5e3 / 3600)
    assert found["train", "fineweb-1p3of15", 42][1:] == (None, None)
    assert found["zeroshot", "fineweb-dense-98m", 42][1] is None
    # The paper's scale was not begun; what a cell of it costs follows from the same speed.
    ((cost,),) = ask(
        "SELECT DISTINCT cost_gpu_hours FROM verdicts JOIN cells USING (cell_id) "
        "WHERE condition = 'fineweb-dense-98m' AND metric = 'ppl' AND op = '' AND scale = 'paper'"
    )
    assert cost == pytest.approx(60_000 * 32 * 2048 / 800_000 / 3600)
    assert ask("SELECT * FROM not_run WHERE scale = 'paper'") == []


@pytest.mark.parametrize(
    "hours, text", [(0.41, "0.41"), (2.34, "2.3"), (9.97, "10"), (213.2, "213"), (1305.0, "1,305")]
)
def test_hours_have_two_digits_and_never_read_as_none(hours, text):
    cell = {"kind": "measured"}
    row = {"verdict": "not run", "note": None, "cost_gpu_hours": hours}
    assert View(cell=cell, rows={"paper": row}).reason == f"{text} GPU-hours"


def test_a_smoke_suite_lists_nothing(tmp_path, ask):
    spec = next(p.spec for p in plan("smoke") if p.spec.kind == "train")
    write_train(tmp_path / "runs", spec, 3.0)
    assert ask("SELECT * FROM not_run") == []
