import json
from pathlib import Path

import pytest
from synthetic import write_library

import mol.store
from mol.cli import main
from mol.plan.build import find_run
from mol.plan.experiments import PAPER
from mol.store.ingest import build

QUERIES = Path(mol.store.__file__).with_name("queries")
README = Path(__file__).parents[2] / "results" / "README.md"
COLUMNS = {
    "verdicts_by_table": ["table", "kind", "verdict", "cells"],
    "reported_against_ours": [
        "place", "row", "printed", "scale", "ours", "nats", "half_width", "verdict", "n_runs",
        "data", "hardware",
    ],
    "seed_spread": ["scale", "condition", "seeds", "mean_nll", "sd_nat"],
    "gap_by_step": ["scale", "seed", "step", "gap_nat"],
    "what_is_behind": [
        "cell_id", "scale", "run_id", "git_commit", "dirty", "text", "hardware", "seconds",
        "command",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The paper's database with a made-up smoke run for everything planned."""
    folder = tmp_path_factory.mktemp("queries")
    write_library(folder / "runs")
    build(folder / "mol.duckdb", folder / "runs", folder / "records", PAPER)
    return folder / "mol.duckdb"


def ask(database, capsys, sql):
    assert main(["store", "query", "--db", str(database), "--json", sql]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", COLUMNS)
def test_worked_query_answers(database, capsys, name):
    rows = ask(database, capsys, str(QUERIES / f"{name}.sql"))
    assert rows and list(rows[0]) == COLUMNS[name]


def test_the_answers_are_right(database, capsys):
    def query(name):
        return ask(database, capsys, str(QUERIES / f"{name}.sql"))

    spread = {row["condition"]: row for row in query("seed_spread")}
    assert {row["seeds"] for row in spread.values()} == {3} and "deltanet-1p3of15" in spread
    gap = query("gap_by_step")
    spec = find_run("cosmo-mol-top3", "smoke", kind="train").spec
    every, steps = spec.evaluation.every, spec.optim.steps
    assert [row["step"] for row in gap] == list(range(every, steps + 1, every))
    table2 = query("what_is_behind")
    top3 = [row for row in table2 if row["cell_id"] == "t02.dense-full.ppl"]
    assert len(top3) == 1 and top3[0]["run_id"].startswith("mol-top3-s42-")
    one = next(row for row in query("reported_against_ours") if row["row"] == "DeltaNet 1+3of15")
    assert (one["printed"], one["n_runs"], one["verdict"]) == ("29.99", 3, "not run at paper scale")


def test_every_worked_query_and_table_is_documented(database, capsys):
    text = README.read_text("utf-8")
    assert {path.stem for path in QUERIES.glob("*.sql")} == COLUMNS.keys()
    assert all(f"`{name}.sql`" in text for name in COLUMNS)
    tables = ask(database, capsys, "SELECT table_name FROM duckdb_tables()")
    for row in tables:
        assert f"    {row['table_name']} {{" in text, row["table_name"]


def test_every_table_and_claim_of_the_paper_is_there(database, capsys):
    tables = ask(database, capsys, 'SELECT DISTINCT "table" FROM cells')
    assert {row["table"] for row in tables} == {*map(str, range(1, 15)), "text"}
    (count,) = ask(database, capsys, "SELECT count(DISTINCT claim_id) AS n FROM claim_results")
    assert count["n"] >= 40
    judged = ask(
        database,
        capsys,
        "SELECT count(*) AS n, count(verdict) AS judged FROM cells LEFT JOIN "
        "(FROM verdicts WHERE scale = 'paper') USING (cell_id) WHERE kind = 'measured'",
    )
    assert judged[0]["n"] == judged[0]["judged"] > 250
