"""What figures and page read: the database, once, as plain rows."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb

from mol.paper.printed import parse
from mol.report.ledger import shown
from mol.report.rows import mappings
from mol.report.view import View, load_views
from mol.store.export import connect

Row = dict[str, Any]

SCALES = ("smoke", "proxy", "paper")


def printed_value(cell: Row) -> float:
    """The number that a cell prints, in its unit."""
    return parse(cell["printed"], 1024.0 if cell["unit"] == "length" else 1e3).value


class Source:
    """Rows of a database; a table that it lacks reads as empty."""

    def __init__(self, path: Path):
        """Raises UserError without a readable database."""
        with connect(path) as database:
            columns = database.execute(
                "SELECT table_name, column_name, data_type FROM information_schema.columns "
                "ORDER BY table_name, ordinal_position"
            ).fetchall()
            names = dict.fromkeys(name for name, _, _ in columns)
            as_json = {(name, column) for name, column, kind in columns if kind == "JSON"}
            self._rows = {
                name: _read(database, name, {c for t, c in as_json if t == name})
                for name in names
                if name not in ("curves", "items")
            }
            self._curves = _read_curves(database) if "curves" in names else {}
            judged = {"cells", "verdicts", "checks"} <= names.keys()
            self.views: list[View] = load_views(database) if judged else []

    def table(self, name: str) -> list[Row]:
        return self._rows.get(name, [])

    @cached_property
    def runs(self) -> dict[str, Row]:
        """Runs by id, complete or not, each with its metrics."""
        runs = {row["run_id"]: row | {"metrics": []} for row in self.table("runs")}
        for metric in self.table("metrics"):
            if metric["run_id"] in runs:
                runs[metric["run_id"]]["metrics"].append(metric)
        return dict(sorted(runs.items()))

    @cached_property
    def variants(self) -> dict[str, str]:
        """Run id of a training run that is not as planned -> in what, in words."""
        found: dict[str, list[str]] = {}
        for row in self.table("variants"):
            own, planned = (shown(row[name]) for name in ("value", "planned"))
            found.setdefault(row["run_id"], []).append(f"{row['key']} = {own}, planned {planned}")
        return {run_id: "; ".join(parts) for run_id, parts in found.items()}

    @cached_property
    def experiments(self) -> dict[str, list[str]]:
        """Experiment -> ids of its runs."""
        found: dict[str, list[str]] = {}
        for row in sorted(self.table("run_experiments"), key=lambda row: row["run_id"]):
            found.setdefault(row["experiment"], []).append(row["run_id"])
        return found

    @property
    def scales(self) -> list[str]:
        """Scales that have complete runs, smallest first."""
        present = {run["scale"] for run in self.runs.values() if run["status"] == "complete"}
        return [scale for scale in SCALES if scale in present]

    def complete(self, scale: str, kind: str, condition: str | None = None) -> list[Row]:
        """Complete runs of a kind, and of a condition if one is given, in order of seed. Of a seed
        that was trained on two machines the latest counts, as in the verdicts."""
        runs = [
            run
            for run in self.runs.values()
            if run["status"] == "complete"
            and (run["scale"], run["kind"]) == (scale, kind)
            and condition in (None, run["condition"])
            and not self.variants.keys() & {run["run_id"], run["spec"].get("train_run")}
        ]
        runs.sort(key=lambda run: (run["condition"], run["seed"], run["finished"], run["run_id"]))
        if kind == "bench":
            return runs
        return list({(run["condition"], run["seed"]): run for run in runs}.values())

    def validation_curve(self, run_id: str) -> list[tuple[int, float]]:
        """(step, nll in nat/token) of the validation set, PAD masked where there is any."""
        return self._curves.get(run_id, [])

    def cells(self, table: str, **where: str) -> list[Row]:
        """Printed numbers of a table, in printed order, that have these values."""
        return [
            cell
            for cell in self.table("cells")
            if cell["table"] == table and all(cell[key] == where[key] for key in where)
        ]


def _read(database: duckdb.DuckDBPyConnection, name: str, as_json: set[str]) -> list[Row]:
    rows = mappings(database.execute(f'SELECT * FROM "{name}" ORDER BY rowid'))
    for row in rows:
        row |= {key: json.loads(row[key]) for key in as_json if row[key] is not None}
    return rows


def _read_curves(database: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    rows = database.execute(
        "SELECT run_id, step, value FROM curves WHERE name = 'validation_nll' ORDER BY ALL"
    )
    for run_id, step, value in rows.fetchall():
        curves.setdefault(run_id, []).append((step, value))
    return curves
