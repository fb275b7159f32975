import json
import os
import re
import time

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_paper import write_paper
from synthetic import CPU, H200, curve_of, record_of, train_metrics, write_run, write_train

from mol.cli import main
from mol.plan.build import plan
from mol.store.export import difference, digests, export
from mol.store.ingest import build


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    return write_paper(tmp_path_factory.mktemp("paper"))


@pytest.fixture
def place(tmp_path, paper):
    """Folders with five runs of the made-up paper; `.build()` builds the database."""

    class Place:
        runs, records, db = tmp_path / "runs", tmp_path / "records", tmp_path / "mol.duckdb"
        specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"]
        options = ["--db", str(db), "--runs", str(runs), "--records", str(records)]

        def build(self):
            return build(self.db, self.runs, self.records, paper)

        def query(self, sql):
            with duckdb.connect(self.db, read_only=True) as database:
                return database.execute(sql).fetchall()

    place = Place()
    place.options += ["--paper", str(paper)]
    for number, spec in enumerate(place.specs[:5]):
        write_train(place.runs, spec, 3.0 + number / 10)
    return place


def test_build_holds_every_run_with_its_metrics_and_curve(place):
    assert place.build() == []
    assert place.query("SELECT count(*) FROM runs WHERE scale = 'smoke'") == [(5,)]
    spec = place.specs[0]
    (value, pad, split), *_ = place.query(
        f"SELECT value, pad, split FROM metrics WHERE run_id = '{spec.run_id}' "
        "AND name = 'nll' ORDER BY split DESC"
    )
    assert (value, pad, split) == (3.0, "none", "validation")
    points = place.query(
        f"SELECT step, tokens FROM curves WHERE run_id = '{spec.run_id}' "
        "AND name = 'validation_nll' ORDER BY step"
    )
    curve = curve_of(spec, 3.0)
    assert len(points) == len(curve) / 4
    steps = spec.optim.steps
    assert points[-1] == (steps, steps * spec.optim.batch_size * 64)
    experiments = place.query("SELECT experiment, count(*) FROM run_experiments GROUP BY 1")
    assert experiments == [("X1", 5)]


def test_rebuild_is_byte_identical(place, tmp_path):
    place.build()
    first = [digests(export(place.db, tmp_path / f"1{kind}", kind)) for kind in ("csv", "parquet")]
    place.db.unlink()
    place.build()
    second = [digests(export(place.db, tmp_path / f"2{kind}", kind)) for kind in ("csv", "parquet")]
    assert first == second
    assert {"runs", "metrics", "curves", "cells", "refused"} <= first[0].keys()


def test_export_has_every_row_in_order(place, tmp_path):
    place.build()
    assert main(["store", "export", "--db", str(place.db), "--out", str(tmp_path / "out")]) == 0
    table = pq.read_table(tmp_path / "out" / "curves.parquet")
    keys = list(zip(table["run_id"].to_pylist(), table["step"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    assert len(keys) == place.query("SELECT count(*) FROM curves")[0][0]


def corrupt(path, content):
    path.write_bytes(content)


def test_bad_files_are_refused_by_name_and_the_rest_kept(place, capsys):
    folders = [place.runs / "smoke" / spec.run_id for spec in place.specs[:5]]
    corrupt(folders[0] / "record.json", b'{"schema_version": 1, "run_id": "x"')  # cut off
    old = json.loads((folders[1] / "record.json").read_text())
    (folders[1] / "record.json").write_text(json.dumps(old | {"schema_version": 0}))
    unknown = json.loads((folders[2] / "record.json").read_text())
    (folders[2] / "record.json").write_text(json.dumps(unknown | {"surprise": 1}))
    content = (folders[3] / "curve.parquet").read_bytes()
    corrupt(folders[3] / "curve.parquet", content[: len(content) // 2])
    moved = place.runs / "smoke" / "elsewhere"
    folders[4].rename(moved)
    refused = {refusal.file: refusal.reason for refusal in place.build()}
    names = [folder.relative_to(place.runs.parent).as_posix() for folder in folders]
    assert refused.keys() == {
        f"{names[0]}/record.json",
        f"{names[1]}/record.json",
        f"{names[2]}/record.json",
        f"{names[3]}/curve.parquet",
        "runs/smoke/elsewhere/record.json",
    }
    assert "schema_version is 0" in refused[f"{names[1]}/record.json"]
    assert "surprise" in refused[f"{names[2]}/record.json"]
    assert all("delete" in reason or "surprise" in reason for reason in refused.values())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(line.startswith("mol store: refused runs/") for line in lines)
    # The record whose curve is damaged was complete, so it stays.
    assert place.query("SELECT run_id FROM runs") == [(place.specs[3].run_id,)]
    assert place.query("SELECT count(*) FROM curves") == [(0,)]
    assert len(place.query("FROM refused")) == 5


@pytest.mark.parametrize("fault", ["nan", "twice", "type", "missing", "gone"])
def test_a_faulty_curve_is_refused_alone(place, fault):
    spec = place.specs[1]
    path = place.runs / "smoke" / spec.run_id / "curve.parquet"
    columns = pq.read_table(path).to_pydict()
    if fault == "nan":
        columns["value"][3] = float("nan")
    elif fault == "twice":
        columns = {key: values + values[-1:] for key, values in columns.items()}
    elif fault == "type":
        columns["step"] = ["one"] * len(columns["step"])
    elif fault == "missing":
        del columns["tokens"]
    pq.write_table(pa.table(columns), path)
    if fault == "gone":
        path.unlink()
    (refusal,) = place.build()
    assert refusal.file == f"runs/smoke/{spec.run_id}/curve.parquet"
    assert "delete the folder to rerun" in refusal.reason
    assert place.query("SELECT count(DISTINCT run_id) FROM curves") == [(4,)]
    assert place.query("SELECT count(*) FROM runs") == [(5,)]


def ship(place, spec, nll, folder, hardware=CPU):
    record = record_of(spec, train_metrics(spec, nll), hardware=hardware)
    return write_run(place.records / folder, record, curve_of(spec, nll))


def losses(place, spec):
    """Name in the database -> validation loss, and the last point of its curve."""
    return {
        name: (loss, point)
        for name, loss, point in place.query(
            "SELECT run_id, metrics.value, (SELECT min(value) FROM curves WHERE curves.run_id = "
            "runs.run_id AND name = 'validation_nll') FROM runs JOIN metrics USING (run_id) WHERE "
            f"starts_with(run_id, '{spec.run_id}') AND name = 'nll' AND split = 'validation'"
        )
    }


def test_an_own_run_takes_the_place_of_the_shipped_one_of_the_same_machine(place):
    spec = place.specs[0]
    folder = ship(place, spec, 9.0, "made-up-cpu")
    assert place.build() == []
    assert losses(place, spec) == {spec.run_id: (3.0, pytest.approx(3.0))}
    ((notes,),) = place.query(f"SELECT notes FROM runs WHERE run_id = '{spec.run_id}'")
    assert json.loads(notes) == ["takes the place of a shipped record (records/made-up-cpu)"]
    assert place.query("SELECT count(*) FROM runs") == [(5,)]
    assert folder.exists()


def test_shipped_records_of_other_machines_stand_beside_the_own_run(place):
    spec, alone = place.specs[0], place.specs[5]
    ship(place, spec, 9.0, "nvidia h200", H200)
    ship(place, spec, 8.0, "nvidia-h200-x4", H200.model_copy(update={"count": 4}))
    ship(place, alone, 7.0, "nvidia h200", H200)
    assert place.build() == []
    assert losses(place, spec) == {
        spec.run_id: (3.0, pytest.approx(3.0)),
        f"{spec.run_id}@nvidia-h200": (9.0, pytest.approx(9.0)),
        f"{spec.run_id}@nvidia-h200-x4": (8.0, pytest.approx(8.0)),
    }
    assert losses(place, alone) == {alone.run_id: (7.0, pytest.approx(7.0))}
    experiments = place.query(
        f"SELECT count(*) FROM run_experiments WHERE starts_with(run_id, '{spec.run_id}')"
    )
    assert experiments == [(3,)]


def test_of_two_shipped_copies_the_second_is_refused(place):
    spec, other = place.specs[0], place.specs[5]
    for condition, name in ((spec, "h200"), (other, "a")):
        ship(place, condition, 9.0, name, H200)
        ship(place, condition, 8.0, f"{name}-again", H200)
    refused = {refusal.file: refusal.reason for refusal in place.build()}
    assert refused.keys() == {
        f"records/h200-again/smoke/{spec.run_id}/record.json",
        f"records/a-again/smoke/{other.run_id}/record.json",
    }
    for reason in refused.values():
        assert "again; it was read from records/" in reason and "delete one" in reason
    assert losses(place, spec).keys() == {spec.run_id, f"{spec.run_id}@h200"}
    assert losses(place, other) == {other.run_id: (9.0, pytest.approx(9.0))}


def test_a_linked_record_is_refused(place, tmp_path):
    outside = place.runs / "smoke" / place.specs[0].run_id
    outside = outside.rename(tmp_path / "outside")
    folder = place.runs / "smoke" / place.specs[0].run_id
    folder.mkdir()
    os.symlink(outside / "record.json", folder / "record.json")
    (refusal,) = place.build()
    assert "is a link" in refusal.reason


def test_readers_keep_the_old_database_while_a_new_one_is_built(place):
    place.build()
    with duckdb.connect(place.db, read_only=True) as reader:
        write_train(place.runs, place.specs[5], 3.9)
        place.build()
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (5,)
    assert place.query("SELECT count(*) FROM runs") == [(6,)]
    assert [path.name for path in place.db.parent.glob(".mol*")] == []


def test_verify_names_the_first_row_that_differs(place, capsys):
    place.build()
    assert main(["store", "verify", *place.options]) == 0
    with duckdb.connect(place.db) as database:
        database.execute("UPDATE metrics SET value = value + 1 WHERE name = 'params_total'")
    capsys.readouterr()
    assert main(["store", "verify", *place.options]) == 1
    assert re.search(r"difference: table metrics, row \d+: .*params_total", capsys.readouterr().out)
    assert "table" in difference(place.db, _other(place))


def _other(place):
    other = place.db.with_name("other.duckdb")
    with duckdb.connect(other) as database:
        database.execute("CREATE TABLE something (a INTEGER)")
    return other


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE runs",
        "SELECT 1; SELECT 2",
        "SELECT * FROM absent",
        "SELEC",
        "",
        "COPY runs TO 'stolen.csv'",
        "SELECT * FROM read_text('made_up_paper.py')",
        "SET enable_external_access = true",
        "no_such_file.sql",
    ],
)
def test_query_refuses_all_but_one_select(place, capsys, sql):
    place.build()
    assert main(["store", "query", "--db", str(place.db), sql]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1


def test_query_prints_json(place, capsys):
    place.build()
    capsys.readouterr()
    sql = "SELECT scale, count(*) AS n, max(started) AS latest FROM runs GROUP BY scale"
    assert main(["store", "query", "--db", str(place.db), "--json", sql]) == 0
    expected = [{"scale": "smoke", "n": 5, "latest": "2026-01-01 12:00:00"}]
    assert json.loads(capsys.readouterr().out) == expected


def test_no_database_and_a_foreign_file_say_the_way_out(tmp_path, capsys):
    for content in (None, b"not a database"):
        path = tmp_path / "mol.duckdb"
        if content:
            path.write_bytes(content)
        assert main(["store", "query", "--db", str(path), "SELECT 1"]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and "mol store build" in err


def test_three_hundred_runs_load_in_seconds(tmp_path, paper):
    spec = plan("smoke", folder=paper)[0].spec
    runs = tmp_path / "runs"
    for seed in range(300):
        copy = spec.model_copy(update={"seed": 10_000 + seed})
        write_train(runs, copy, 3.0)
    start = time.monotonic()
    assert build(tmp_path / "mol.duckdb", runs, tmp_path / "records", paper) == []
    assert time.monotonic() - start < 20
