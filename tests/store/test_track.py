import json
import sqlite3

import pytest
from made_up_paper import write_paper
from synthetic import bench_metrics, curve_of, record_of, train_metrics, write_run, write_train

from mol.cli import main
from mol.plan.build import plan


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Two training runs and a benchmark, mirrored once."""
    folder = tmp_path_factory.mktemp("track")
    paper = write_paper(folder / "paper")
    specs = [planned.spec for planned in plan("smoke", folder=paper)]
    trained = [spec for spec in specs if spec.condition == "plain"][:2]
    bench = next(spec for spec in specs if spec.kind == "bench")
    for spec in trained:
        write_train(folder / "runs", spec, 3.5)
    write_run(folder / "runs", record_of(bench, bench_metrics(bench)))
    options = [
        "track", "--runs", str(folder / "runs"), "--records", str(folder / "records"),
        "--paper", str(paper), "--mlflow", str(folder / "mlflow.db"), "--json",
    ]  # fmt: skip
    assert main(options) == 0
    return folder, options, trained, bench


def query(folder, sql, *values):
    with sqlite3.connect(folder / "mlflow.db") as database:
        return database.execute(sql, values).fetchall()


def test_every_record_becomes_a_run_of_its_experiment(tracked):
    folder, _, trained, bench = tracked
    found = query(
        folder,
        "SELECT experiments.name, runs.name, runs.status FROM runs JOIN experiments "
        "USING (experiment_id) ORDER BY 1, 2",
    )
    expected = [("X1", spec.run_id, "FINISHED") for spec in trained]
    assert found == sorted(expected) + [("X2", bench.run_id, "FINISHED")]


def test_parameters_tags_and_metrics_are_those_of_the_record(tracked):
    folder, _, (spec, _), _ = tracked
    (uuid,) = query(folder, "SELECT run_uuid FROM runs WHERE name = ?", spec.run_id)[0]
    params = dict(query(folder, "SELECT key, value FROM params WHERE run_uuid = ?", uuid))
    assert params["optim.steps"] == str(spec.optim.steps) and params["model.layer.kind"] == "dense"
    tags = dict(query(folder, "SELECT key, value FROM tags WHERE run_uuid = ?", uuid))
    assert (tags["scale"], tags["seed"], tags["condition"]) == ("smoke", "1", "plain")
    assert tags["hardware"] == "1 x Made-up CPU" and tags["git_commit"] == "0" * 40
    points = query(
        folder,
        "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'curve/validation_nll' "
        "ORDER BY step",
        uuid,
    )
    curve = curve_of(spec, 3.5).to_pylist()
    assert points == [(p["step"], p["value"]) for p in curve if p["name"] == "validation_nll"]
    final = query(
        folder, "SELECT value FROM metrics WHERE run_uuid = ? AND key = 'nll/test/none'", uuid
    )
    assert final == [(3.5,)]


def test_a_second_call_adds_nothing_and_a_new_record_replaces_its_run(tracked, capsys):
    folder, options, (spec, _), _ = tracked
    before = query(folder, "SELECT count(*) FROM metrics")
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out) | {"added": 0, "kept": 3} == {
        "mlflow": str(folder / "mlflow.db"), "records": 3, "added": 0, "kept": 3,
    }  # fmt: skip
    assert query(folder, "SELECT count(*) FROM metrics") == before
    again = record_of(spec, train_metrics(spec, 2.5))
    write_run(folder / "runs", again, curve_of(spec, 2.5))
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out)["added"] == 1
    live = query(
        folder,
        "SELECT count(*) FROM runs WHERE name = ? AND lifecycle_stage = 'active'",
        spec.run_id,
    )
    assert live == [(1,)]


def test_an_unfinished_mirror_is_completed(tracked, capsys):
    folder, options, (_, spec), _ = tracked
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute("UPDATE runs SET status = 'RUNNING' WHERE name = ?", [spec.run_id])
    assert main(options) == 0
    assert json.loads(capsys.readouterr().out)["added"] == 1


@pytest.mark.parametrize("content", [b"not a database " * 100, None, "locked"])
def test_a_broken_tracker_warns_in_one_line_and_stops_nothing(tracked, tmp_path, capsys, content):
    _, options, _, _ = tracked
    target = tmp_path / "mlflow.db"
    if content is None:
        target.mkdir()
    elif content == "locked":
        other = sqlite3.connect(target)
        other.execute("BEGIN EXCLUSIVE")
    else:
        target.write_bytes(content)
    at = options.index("--mlflow") + 1
    assert main([*options[:at], str(target), *options[at + 1 :]]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("mol track")]
    assert out == "" and len(lines) == 1 and "is not up to date" in lines[0]
