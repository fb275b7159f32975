"""Build the database from the records: the only writer, and the only reader of run folders.

The file is built beside its place and renamed over it, so a reader keeps the old one and a
killed build leaves nothing behind but a temporary file.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from mol.base import reason_of, scratch
from mol.plan.experiments import Paper, load_experiments
from mol.store.matrix import matrix_rows
from mol.store.membership import experiments_of
from mol.store.paper import insert, insert_paper, insert_verdicts
from mol.store.read import Found, Refusal, metric_rows, run_row
from mol.store.twins import read_runs

SCHEMA = Path(__file__).with_name("schema.sql")
BATCH = 500  # runs inserted at a time, which bounds the memory that curves take


def build(db_path: Path, runs_root: Path, records_root: Path, paper_folder: Path) -> list[Refusal]:
    """Write `db_path` from every record below the two folders and the paper's own data.

    Returns what was refused, each also a row of table `refused` and a line on stderr.
    """
    db_path, paper_folder = Path(db_path), Path(paper_folder)
    with scratch(db_path) as folder:
        fresh = folder / db_path.name
        with _connect(fresh) as database:
            database.execute("SET threads = 1")  # rows land in the order in which they are given
            database.execute(SCHEMA.read_text("utf-8"))
            insert_paper(database, paper_folder)
            refused = _insert_runs(
                database, Path(runs_root), Path(records_root), load_experiments(paper_folder)
            )
            insert(database, "refused", [vars(refusal) for refusal in refused])
            insert_verdicts(database, paper_folder)
            database.execute("CHECKPOINT")
        fresh.replace(db_path)
    for refusal in refused:
        print(f"mol store: refused {refusal.file}: {refusal.reason}", file=sys.stderr)
    return refused


@contextlib.contextmanager
def _connect(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A new database. OSError where the disk refuses it."""
    try:
        with duckdb.connect(path) as database:
            yield database
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) or "No space left" in str(error):
            raise OSError(reason_of(error)) from None
        raise


def _insert_runs(
    database: duckdb.DuckDBPyConnection, runs_root: Path, records_root: Path, paper: Paper
) -> list[Refusal]:
    refused: list[Refusal] = []
    waiting: list[Found] = []
    for found in read_runs(runs_root, records_root):
        if isinstance(found, Refusal):
            refused.append(found)
            continue
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
            {"run_id": found.run_id, "experiment": experiment}
            for found in batch
            for experiment in experiments_of(found.record.spec, paper)
        ],
    )
    insert(database, "metrics", [row for found in batch for row in metric_rows(found)])
    insert(
        database,
        "protocols",
        [
            row | {"run_id": found.run_id}
            for found in batch
            if found.matrix
            for row in matrix_rows(found.matrix)
        ],
    )
    for found in batch:
        if found.samples is not None:
            scored = found.samples.add_column(  # noqa: F841, found by name in the query
                0, "run_id", pa.array([found.run_id] * len(found.samples))
            )
            database.execute("INSERT INTO items BY NAME SELECT * FROM scored")
    drawn = [found for found in batch if found.curve is not None]
    if not drawn:
        return []
    owner = np.repeat(np.arange(len(drawn)), [len(found.curve) for found in drawn])
    names = pa.DictionaryArray.from_arrays(owner, [found.run_id for found in drawn])
    points = pa.concat_tables([found.curve for found in drawn])
    points = points.add_column(0, "run_id", names)  # found by name in the queries
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
        if found.run_id in names
    ]
