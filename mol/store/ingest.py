"""Build the database from the records: the only writer, and the only reader of run folders.

The file is built beside its place and renamed over it, so a reader keeps the old one and a
killed build leaves nothing behind but a temporary file.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from mol.base import canonical_json
from mol.paper.derivations import check_paper, load_checks
from mol.paper.reported import load_paper
from mol.plan.experiments import Paper, load_experiments
from mol.report.judge import verdict_rows
from mol.report.readings import load_runs
from mol.store.membership import experiments_of
from mol.store.read import Found, Refusal, metric_rows, read_folders, run_row

SCHEMA = Path(__file__).with_name("schema.sql")
BATCH = 500  # runs inserted at a time, which bounds the memory that curves take


def build(db_path: Path, runs_root: Path, records_root: Path, paper_folder: Path) -> list[Refusal]:
    """Write `db_path` from every record below the two folders and the paper's own data.

    Returns what was refused, each also a row of table `refused` and a line on stderr. A run
    found twice is kept once: local runs come first, then shipped records, each by path.
    """
    db_path, paper_folder = Path(db_path), Path(paper_folder)
    db_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=db_path.parent, prefix=f".{db_path.name}.") as scratch:
        fresh = Path(scratch) / db_path.name
        with duckdb.connect(fresh) as database:
            database.execute("SET threads = 1")  # rows land in the order in which they are given
            database.execute(SCHEMA.read_text("utf-8"))
            _insert_paper(database, paper_folder)
            refused = _insert_runs(
                database, Path(runs_root), Path(records_root), load_experiments(paper_folder)
            )
            insert(database, "refused", [vars(refusal) for refusal in refused])
            _insert_verdicts(database, paper_folder)
            database.execute("CHECKPOINT")
        fresh.replace(db_path)
    for refusal in refused:
        print(f"mol store: refused {refusal.file}: {refusal.reason}", file=sys.stderr)
    return refused


def insert(database: duckdb.DuckDBPyConnection, table: str, rows: list[dict]) -> None:
    """Append `rows`, keyed by column, to `table`."""
    if rows:
        # Rows may lack columns; arrow would take those of the first row for all.
        columns = dict.fromkeys(key for row in rows for key in row)
        batch = pa.table({key: [row.get(key) for row in rows] for key in columns})  # noqa: F841, found by name in the query
        database.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM batch')


def _insert_runs(
    database: duckdb.DuckDBPyConnection, runs_root: Path, records_root: Path, paper: Paper
) -> list[Refusal]:
    refused: list[Refusal] = []
    seen: dict[str, str] = {}
    waiting: list[Found] = []
    for root, placed in ((runs_root, True), (records_root, False)):
        for found in read_folders(root, placed=placed):
            if isinstance(found, Refusal):
                refused.append(found)
            elif found.record.run_id in seen:
                first = seen[found.record.run_id]
                reason = f"is run {found.record.run_id} again; it was read from {first}: delete one"
                refused.append(Refusal(file=f"{found.source}/record.json", reason=reason))
            else:
                seen[found.record.run_id] = found.source
                waiting.append(found)
            if len(waiting) == BATCH:
                refused += _insert_batch(database, waiting, paper)
                waiting = []
    return refused + _insert_batch(database, waiting, paper)


def _insert_batch(
    database: duckdb.DuckDBPyConnection, batch: list[Found], paper: Paper
) -> list[Refusal]:
    insert(database, "runs", [run_row(found) for found in batch])
    insert(
        database,
        "run_experiments",
        [
            {"run_id": found.record.run_id, "experiment": experiment}
            for found in batch
            for experiment in experiments_of(found.record.spec, paper)
        ],
    )
    insert(database, "metrics", [row for found in batch for row in metric_rows(found.record)])
    tables = [
        found.curve.add_column(0, "run_id", pa.array([found.record.run_id] * len(found.curve)))
        for found in batch
        if found.curve is not None
    ]
    if not tables:
        return []
    points = pa.concat_tables(tables)  # noqa: F841, found by name in the queries
    broken = database.execute(
        "SELECT DISTINCT run_id FROM points WHERE NOT isfinite(value) UNION "
        "SELECT run_id FROM points GROUP BY run_id, name, step HAVING count(*) > 1"
    ).fetchall()
    names = [run_id for (run_id,) in broken]
    database.execute(
        "INSERT INTO curves BY NAME SELECT * FROM points WHERE NOT list_contains(?, run_id)",
        [names],
    )
    reason = "has a value that is not finite, or two at one step; delete the folder to rerun"
    return [
        Refusal(file=f"{found.source}/curve.parquet", reason=reason)
        for found in batch
        if found.record.run_id in names
    ]


def _insert_paper(database: duckdb.DuckDBPyConnection, folder: Path) -> None:
    runs = load_experiments(folder)
    insert(
        database,
        "conditions",
        [
            {
                "condition": slug,
                "label": condition.label,
                "recipe": condition.recipe,
                "corpus": runs.recipes[condition.recipe].corpus,
                "model": canonical_json(runs.model(slug)),
            }
            for slug, condition in runs.conditions.items()
        ],
    )
    insert(
        database,
        "experiments",
        [
            {"experiment": name, **experiment.model_dump(include={"title", "paper", "note"})}
            for name, experiment in runs.experiments.items()
        ],
    )
    insert(
        database,
        "experiment_conditions",
        [
            {
                "experiment": name,
                "condition": slug,
                "kind": kind,
                "seeds": canonical_json(
                    runs.seeds if slug in experiment.three_seeds else runs.seeds[:1]
                ),
            }
            for name, experiment in runs.experiments.items()
            for kind, slugs in (
                ("train", experiment.conditions),
                ("zeroshot", experiment.conditions if experiment.zero_shot else ()),
                ("bench", experiment.benches),
            )
            for slug in slugs
        ],
    )
    insert(database, "cells", list(_cell_rows(folder)))
    if (folder / "derivations.toml").is_file():
        insert(database, "checks", list(_check_rows(folder)))


def _check_rows(folder: Path) -> Iterable[dict]:
    judged = check_paper(load_paper(folder))
    for check, row in zip(load_checks(folder), judged, strict=True):
        yield {
            **row.model_dump(mode="json", exclude={"id", "inputs"}),
            "check_id": row.id,
            "cell_id": check.of or None,
            "inputs": canonical_json([source.model_dump() for source in row.inputs]),
        }


def _insert_verdicts(database: duckdb.DuckDBPyConnection, folder: Path) -> None:
    rows = verdict_rows(load_paper(folder).cells, load_runs(database), load_experiments(folder))
    insert(database, "verdicts", list(rows))


def _cell_rows(folder: Path) -> Iterable[dict]:
    for position, cell in enumerate(load_paper(folder).cells):
        row = cell.model_dump(mode="json")
        seeds, labels = canonical_json(row["seeds"]), canonical_json(row["labels"])
        yield {**row, "position": position, "seeds": seeds, "labels": labels}
