"""The cost of a plan's runs: from records of a GPU alone, of the same model and length."""

import json
from datetime import UTC, datetime

import pytest

from mol.cli import main
from mol.plan.build import plan
from mol.plan.cost import costs, summary
from mol.plan.spec import BenchSpec
from mol.store.record import Hardware, Metric, Provenance, Record, save_record

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def save(results, spec, metrics, device="cuda", name="NVIDIA H200", count=1):
    record = Record(
        run_id=spec.run_id,
        spec=spec,
        status="complete",
        started=MOMENT,
        finished=MOMENT,
        wall_s=0.0,
        hardware=Hardware(device=device, name=name, count=count, threads=1, memory_gib=1.0),
        provenance=Provenance(
            git_commit=None, dirty=None, code_sha256="0" * 64, versions={}, data={}, command="mol"
        ),
        metrics=tuple(metrics),
    )
    save_record(results / "runs" / spec.scale / spec.run_id, record)


def rate(value, **labels):
    return Metric(name="train_tokens_per_s", value=value, unit="token/s", labels=labels)


def bench(planned, **changes):
    case = {"model": planned.spec.model, "seq_len": planned.spec.seq_len, "batch_size": 8}
    arguments = {"program": "train_step", "cases": {planned.spec.condition: case | changes}}
    return BenchSpec(scale="paper", condition="train-step", bench=arguments)


@pytest.fixture
def runs():
    wanted = ("dense-softmax-85m", "deltanet-1p2of5", "fineweb-dense-98m", "dense-1p3b")
    first = {}
    for planned in plan("paper"):
        if planned.spec.condition in wanted and planned.spec.kind == "train":
            first.setdefault(planned.spec.condition, planned)
    return first


def test_hours_are_tokens_over_the_fastest_measured_speed(tmp_path, runs):
    dense = runs["dense-softmax-85m"]
    assert all(c.hours is None and not c.done for c in costs(runs.values(), tmp_path).values())
    save(tmp_path, bench(dense), [rate(500_000.0, model="dense-softmax-85m", length=255)])
    slower = bench(dense, batch_size=2)
    save(tmp_path, slower, [rate(400_000.0, model="dense-softmax-85m", length=255)])
    other = bench(dense, seq_len=512)
    save(tmp_path, other, [rate(900_000.0, model="dense-softmax-85m", length=512)])
    on_cpu = bench(dense, batch_size=1)
    save(tmp_path, on_cpu, [rate(9e9, model="dense-softmax-85m", length=255)], device="cpu")
    found = costs(runs.values(), tmp_path)
    cost = found[dense.run_id]
    assert cost.hours == pytest.approx(50_000 * 64 * 255 / 500_000 / 3600)
    assert cost.speed.gpu == "NVIDIA H200" and cost.speed.run_id == bench(dense).run_id
    assert [c.hours is None for c in found.values()].count(False) == 1
    assert summary(found.values()) == (
        "4 training runs, 26.5B tokens, 0.45 GPU-hours for 1 to come (NVIDIA H200), "
        "3 not measured, the paper states 213.2 for 1"
    )


def test_a_finished_proxy_run_prices_the_papers_run_for_each_of_its_gpus(tmp_path, runs):
    short = next(p for p in plan("proxy") if p.spec.condition == "fineweb-dense-98m")
    save(tmp_path, short.spec, [rate(800_000.0)], count=2)
    cost = costs(runs.values(), tmp_path)[runs["fineweb-dense-98m"].run_id]
    assert cost.hours == pytest.approx(60_000 * 32 * 2048 / 400_000 / 3600) and not cost.done
    assert costs([short], tmp_path)[short.run_id].done


def test_the_command_prints_the_cost_beside_the_papers(tmp_path, runs, capsys):
    mine = runs["dense-1p3b"]
    save(tmp_path, bench(mine), [rate(50_000.0, model="dense-1p3b", length=4096)])
    words = ["plan", "--scale", "paper", "--experiment", "E11", "--results", str(tmp_path)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("dense-1p3b"))
    hours = 20_000 * 256 * 4096 / 50_000 / 3600
    assert line.endswith(f"not run, {hours:,.2f}  (paper 213.2)")
    assert next(x for x in lines if x.startswith("mol-2p08b")).endswith(
        "not run, not measured  (paper 408.0)"
    )
    assert lines[-1].endswith("the paper states 799.2 for 3")
    assert main([*words, "--json"]) == 0
    rows = {row["condition"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["dense-1p3b"]["gpu_hours"] == pytest.approx(hours)
    assert rows["mol-2p08b"]["gpu_hours"] is None and rows["mol-2p08b"]["paper_gpu_hours"] == 408


def test_a_proxy_plan_reads_not_run_with_measured_hours_or_says_that_none_is(tmp_path, capsys):
    words = ["plan", "--scale", "proxy", "--experiment", "E10", "--results", str(tmp_path)]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(x.endswith("not run, not measured") for x in lines if x.startswith("fineweb-"))
    assert lines[-1].startswith("no record of a GPU holds a speed")
    short = {p.spec.condition: p for p in plan("proxy") if p.spec.kind == "train"}
    save(tmp_path, short["fineweb-dense-98m"].spec, [rate(800_000.0)])
    case = short["fineweb-1p3of15"]
    save(tmp_path, bench(case), [rate(400_000.0, model="fineweb-1p3of15", length=2048)])
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    state = {x.split("-s42-")[0]: x for x in lines if x.startswith("fineweb-")}
    assert state["fineweb-dense-98m"].endswith("done")
    assert state["fineweb-1p3of15"].endswith(f"not run, {65_536_000 / 400_000 / 3600:.2f}")
    assert state["fineweb-1p3of10"].endswith("not run, not measured")
    assert "no record" not in lines[-1] and "0.05 GPU-hours for 1 to come" in lines[-1]


def test_runs_of_one_gpu_are_summed_apart_from_those_of_several(tmp_path, capsys):
    assert main(["plan", "--scale", "paper", "--results", str(tmp_path)]) == 0
    sums = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    by_id = [line.split(":")[0] for line in sums if line.startswith("E")]
    assert by_id == sorted(by_id)
    assert "on 1 GPU: 60 training runs, 141B tokens, 60 not measured" in sums
    assert sums[-2].startswith("on 4 GPUs: 3 training runs, 62.9B tokens")
    assert sums[-1].startswith("all: 63 training runs, 204B tokens")


@pytest.mark.parametrize("made", [lambda path: None, lambda path: path.write_text("")])
def test_results_that_are_no_folder_are_refused(made, tmp_path, capsys):
    made(tmp_path / "results")
    assert main(["plan", "--scale", "paper", "--results", str(tmp_path / "results")]) == 2
    assert "no folder; name one" in capsys.readouterr().err
