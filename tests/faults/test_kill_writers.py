"""kill -9 of whoever writes a record, a curve or the database: what lies there is whole."""

import time

import duckdb
import pytest
from made_up_paper import write_paper
from processes import call, changed, kill_at_random, spread
from synthetic import curve_of, record_of, train_metrics, write_train
from victims import save_records, write_curves

from mol.plan.build import plan
from mol.store.export import digests, export
from mol.store.ingest import build
from mol.store.read import read_folders
from mol.store.record import save_record
from mol.train.loop import write_curve


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    return write_paper(tmp_path_factory.mktemp("paper"))


@pytest.mark.parametrize("written", ["record", "curve"])
def test_a_run_is_whole_whenever_its_writer_is_killed(tmp_path, paper, written):
    spec = next(p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train")
    folder = write_train(tmp_path / "runs", spec, 3.0)
    record = record_of(spec, 200 * train_metrics(spec, 3.0))
    rows = [tuple(row.values()) for row in curve_of(spec, 3.0).to_pylist()] * 200
    target = (save_records, folder, record) if written == "record" else (write_curves, folder, rows)
    seen = set()

    def check():
        (found,) = read_folders(tmp_path / "runs", placed=True)
        assert found.record.spec == spec and found.curve is not None
        if written == "record":
            seen.add(found.record.wall_s)
        else:
            values = set(found.curve["value"].to_pylist())
            assert len(values) == 1, "the points of one writing"
            seen.update(values)

    begun = changed(folder / ("record.json" if written == "record" else "curve.parquet"))
    kill_at_random(tmp_path, *target, begun=begun, moments=spread(0, 0.05, 10), check=check)
    assert seen
    save_record(folder, record)
    write_curve(folder / "curve.parquet", rows)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "curve.parquet", "record.json",
    ]  # fmt: skip


def test_the_database_is_the_old_or_the_new_whenever_the_loader_is_killed(tmp_path, paper):
    specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"]
    for spec in specs[:3]:
        write_train(tmp_path / "runs", spec, 3.0)
    db = tmp_path / "results" / "mol.duckdb"
    arguments = (db, tmp_path / "runs", tmp_path / "records", paper)
    started = time.monotonic()
    assert call(tmp_path, build, *arguments).code == 0
    takes = time.monotonic() - started

    def content():
        return digests(export(db, tmp_path / "exported", "csv"))

    old = content()
    for spec in specs[3:]:
        write_train(tmp_path / "runs", spec, 4.0)
    outcomes = []

    def check():
        outcomes.append(content() == old)
        with duckdb.connect(db, read_only=True) as database:
            (runs,) = database.execute("SELECT count(*) FROM runs").fetchone()
        assert runs == (3 if outcomes[-1] else len(specs))

    kill_at_random(
        tmp_path,
        build,
        *arguments,
        begun=lambda: {path.name for path in db.parent.glob(".mol.duckdb.*")},
        moments=spread(0, 0.5 * takes, 8),
        check=check,
    )
    assert True in outcomes, "at least one was killed before it was done"
    assert build(*arguments) == []
    rebuilt = content()
    db.unlink()
    assert build(*arguments) == [] and content() == rebuilt != old
    assert [path.name for path in db.parent.iterdir()] == [db.name], "no remains of the killed"
