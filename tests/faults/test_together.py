"""Several writers at once, a tracker that is down, a clock that goes back."""

import json
import os
import sqlite3
import time

import duckdb
import pytest
from made_up_paper import write_paper
from processes import FORK, call, finish, start
from synthetic import curve_of, record_of, train_metrics, write_train
from victims import (
    command,
    export_often,
    mirror_at_once,
    set_clock_back,
    train_when_told,
    write_runs,
)

from mol.plan.build import plan
from mol.store.ingest import build
from mol.store.read import read_folders
from mol.store.record import load_record
from mol.train.checkpoint import STATE


def test_eight_writers_of_one_tracking_store_lose_nothing(tmp_path):
    paper = write_paper(tmp_path / "paper")
    specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"][:8]
    for spec in specs:
        write_train(tmp_path / "runs", spec, 3.0)
    found = list(read_folders(tmp_path / "runs", placed=True))
    assert len(found) == 8
    path = tmp_path / "mlflow.db"
    done = call(tmp_path, mirror_at_once, path, found, ["X1"])
    assert done.code == 0, done.err
    with sqlite3.connect(path) as database:
        runs = database.execute(
            "SELECT name, status, (SELECT count(*) FROM metrics WHERE metrics.run_uuid = "
            "runs.run_uuid) FROM runs ORDER BY name"
        ).fetchall()
        experiments = database.execute("SELECT count(*) FROM experiments WHERE name = 'X1'")
        assert experiments.fetchone() == (1,)
    assert [(name, status) for name, status, _ in runs] == [
        (run.run_id, "FINISHED") for run in sorted(found, key=lambda run: run.run_id)
    ]
    assert all(points > len(found[0].record.metrics) for *_, points in runs)


@pytest.mark.parametrize("fault", ["down", "locked", "garbage"])
def test_a_tracker_that_fails_costs_one_line_and_no_run(tmp_path, fault):
    paper = write_paper(tmp_path / "paper")
    spec = plan("smoke", folder=paper)[0].spec
    write_train(tmp_path / "runs", spec, 3.0)
    store = tmp_path / "mlflow.db"
    holder = None
    if fault == "down":
        (tmp_path / "file").write_text("not a folder")
        store = tmp_path / "file" / "mlflow.db"
    elif fault == "locked":
        holder = sqlite3.connect(store)
        holder.execute("BEGIN EXCLUSIVE")
    else:
        store.write_bytes(b"no database" * 500)
    argv = ["track", "--runs", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    argv += ["--paper", str(paper), "--mlflow", str(store)]
    done = call(tmp_path, command, argv)
    assert done.code == 0 and done.err.count("\n") == 1, done
    assert "warning" in done.err and str(store) in done.err and "is not up to date" in done.err
    if holder:
        holder.close()


def test_a_second_process_on_one_run_is_refused_and_the_first_goes_on(place, uncut, tmp_path):
    barrier = FORK.Barrier(2)
    (tmp_path / "first").mkdir()
    first = start(tmp_path / "first", train_when_told, place.train(), barrier)
    barrier.wait(60)
    second = call(tmp_path, command, place.train())
    assert second.code == 2 and second.err.count("\n") == 1
    assert f"process {first.pid} on " in second.err and "trains this run; wait" in second.err
    barrier.wait(60)
    assert finish(tmp_path / "first", first).code == 0
    assert place.curve() == uncut.curve


def test_two_builds_of_one_database_both_end_well(tmp_path):
    paper = write_paper(tmp_path / "paper")
    for planned in plan("smoke", folder=paper)[:4]:
        write_train(tmp_path / "runs", planned.spec, 3.0)
    db = tmp_path / "results" / "mol.duckdb"
    arguments = (db, tmp_path / "runs", tmp_path / "records", paper)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    builds = []
    for folder in folders:
        folder.mkdir()
        builds.append(start(folder, build, *arguments))
    assert [finish(*pair).code for pair in zip(folders, builds, strict=True)] == [0, 0, 0]
    options = ["--db", str(db), "--runs", str(arguments[1]), "--records", str(arguments[2])]
    assert call(tmp_path, command, ["store", "verify", *options, "--paper", str(paper)]).code == 0
    assert [path.name for path in db.parent.iterdir()] == ["mol.duckdb"]


def test_exports_into_one_folder_all_end_well(tmp_path):
    db, out = tmp_path / "mol.duckdb", tmp_path / "out"
    paper = write_paper(tmp_path / "paper")
    assert build(db, tmp_path / "runs", tmp_path / "records", paper) == []
    folders = [tmp_path / name for name in ("one", "two", "three")]
    exports = []
    for folder in folders:
        folder.mkdir()
        exports.append(start(folder, export_often, db, out))
    assert [finish(*pair).code for pair in zip(folders, exports, strict=True)] == [0, 0, 0]
    assert not list(out.glob(".*"))


def test_eight_jobs_write_records_while_the_database_is_built_and_read(tmp_path):
    paper = write_paper(tmp_path / "paper")
    specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"][:8]
    db, runs = tmp_path / "results" / "mol.duckdb", tmp_path / "runs"
    folders = [tmp_path / f"job{i}" for i in range(8)]
    jobs = []
    for folder, spec in zip(folders, specs, strict=True):
        folder.mkdir()
        rows = [tuple(row.values()) for row in curve_of(spec, 3.0).to_pylist()]
        record = record_of(spec, train_metrics(spec, 3.0))
        jobs.append(start(folder, write_runs, runs, record, rows, 20))
    seen = []
    while any(job.is_alive() for job in jobs) or len(seen) < 2:
        assert build(db, runs, tmp_path / "records", paper) == []
        with duckdb.connect(db, read_only=True) as reader:
            seen.append(reader.execute("SELECT count(*) FROM runs").fetchone()[0])
    assert [finish(*pair).code for pair in zip(folders, jobs, strict=True)] == [0] * 8
    assert build(db, runs, tmp_path / "records", paper) == []
    with duckdb.connect(db, read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (8,)
    assert seen == sorted(seen)


def test_a_clock_that_goes_back_orders_no_run_backwards(place, uncut, tmp_path):
    before = time.time()
    done = call(tmp_path, set_clock_back, place.train(), 10)
    assert done.code == 0, done.err
    record = load_record(place.run / "record.json")
    assert record.started < record.finished
    assert record.started.timestamp() >= before - 1 and 0 < record.wall_s < 60
    assert place.curve() == uncut.curve


def test_a_checkpoint_from_the_future_is_resumed(place, uncut, tmp_path):
    first = call(tmp_path, command, place.train("--stop-after", "6"))
    assert first.code == 0, first.err
    os.utime(place.run / STATE, (time.time() + 86_400,) * 2)
    done = call(tmp_path, command, [*place.train(), "--json"])
    assert done.code == 0, done.err
    assert json.loads(done.out)["wall_s"] > 0
    assert place.curve() == uncut.curve
