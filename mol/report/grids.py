"""A table of the paper as grids of text: rows that share columns, as printed.

Figures of a caption, which share no column with the rows, become grids of their own below.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import duckdb

from mol.report.view import SCALES, View

KINDS = ("measured", "count", "derived")  # settings have nothing to compare
SCALE_NAMES = {"paper": "reproduced"}  # other scales go by their own name


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A rectangle of plain text with a heading."""

    title: str
    header: list[str]
    rows: list[list[str]]


def _blocks(views: list[View]) -> list[list[View]]:
    """Split a table's cells so that rows in different blocks share no column."""
    blocks: list[tuple[set[str], list[View]]] = []
    rows: dict[str, list[View]] = {}
    for view in views:
        rows.setdefault(view.cell["row"], []).append(view)
    for row in rows.values():
        columns = {view.cell["column"] for view in row}
        joined = [block for block in blocks if block[0] & columns]
        merged = (set().union(columns, *(b[0] for b in joined)), sum((b[1] for b in joined), []))
        blocks = [block for block in blocks if block not in joined]
        blocks.append((merged[0], merged[1] + row))
    order = {view.cell["cell_id"]: number for number, view in enumerate(views)}
    found = [sorted(block[1], key=lambda v: order[v.cell["cell_id"]]) for block in blocks]
    return sorted(found, key=lambda block: order[block[0].cell["cell_id"]])


def grids_of(views: list[View], marks: dict[str, list[int]]) -> list[Grid]:
    """The grids of one table's cells. `marks`: cell_id -> numbers of its footnotes."""
    return [_grid(block, marks) for block in _blocks(views)]


def _grid(block: list[View], marks: dict[str, list[int]]) -> Grid:
    at: dict[str, dict[str, list[View]]] = {}
    for view in block:
        at.setdefault(view.cell["row"], {}).setdefault(view.cell["column"], []).append(view)
    header, lines = [""], [[_marked(row, at[row], marks)] for row in at]
    for column in dict.fromkeys(view.cell["column"] for view in block):
        own = [view for view in block if view.cell["column"] == column]
        parts = _parts(own) if any(v.cell["kind"] in KINDS for v in own) else {"": _reported}
        header += [f"{column} {name}".strip() for name in parts]
        for row, line in zip(at, lines, strict=True):
            cells = at[row].get(column, [])
            line += [" / ".join(filter(None, map(show, cells))) for show in parts.values()]
    place = block[0].cell["place"]
    return Grid(
        title=place if " " in place.removeprefix("Table ") else "", header=header, rows=lines
    )


def _marked(row: str, columns: dict[str, list[View]], marks: dict[str, list[int]]) -> str:
    cells = [view.cell["cell_id"] for views in columns.values() for view in views]
    numbers = sorted({number for cell in cells for number in marks.get(cell, ())})
    return " ".join([row, *(f"[{number}]" for number in numbers)]).strip()


def _parts(views: list[View]) -> dict[str, Callable[[View], str]]:
    """Sub-columns of a compared column: what is shown of each cell, by heading."""
    scales = {
        SCALE_NAMES.get(scale, scale): functools.partial(View.figure, scale=scale)
        for scale in _scales(views)
    }
    return {"reported": _reported, **scales, "difference": _difference, "verdict": _verdict}


def _reported(view: View) -> str:
    return view.reported


def _scales(views: list[View]) -> list[str]:
    """Scales with a figure for any of these cells, the smallest first; counts need no runs."""
    return [scale for scale in reversed(SCALES) if any(view.figure(scale) for view in views)]


def _difference(view: View) -> str:
    row = view.best
    own = f" [{row['scale']}]" if row and row["scale"] != "paper" else ""
    return f"{view.difference}{own}" if view.difference else ""


def _verdict(view: View) -> str:
    if view.verdict and view.cell["kind"] == "derived":
        return f"self-check: {view.verdict}"
    return view.state


def text_grid(views: list[View], marks: dict[str, list[int]]) -> Grid:
    """The numbers of the paper's sentences, one a row."""
    shown = [view for view in views if view.cell["kind"] in KINDS]
    parts = _parts(shown)
    rows = [
        [
            view.cell["place"],
            _marked(view.cell["row"], {"": [view]}, marks),
            *(show(view) for show in parts.values()),
        ]
        for view in shown
    ]
    return Grid(title="", header=["place", "number", *parts], rows=rows)


def extra_grid(database: duckdb.DuckDBPyConnection, views: list[View]) -> list[Grid]:
    """Figures of the table's benchmarks at settings that the paper does not print, such as the
    short lengths of the smoke scale; an empty list without any."""
    asked: dict[tuple[str, str], list[dict]] = {}
    for view in views:
        cell = view.cell
        if cell["kind"] == "measured" and cell["metric"]:
            asked.setdefault((cell["condition"], cell["metric"]), []).append(cell["labels"])
    rows = []
    for (condition, metric), printed in asked.items():
        found = database.execute(
            "SELECT scale, labels, value, unit, hardware FROM metrics JOIN runs USING (run_id) "
            "WHERE kind = 'bench' AND status = 'complete' AND condition = ? AND name = ? "
            "ORDER BY scale, run_id, metrics.rowid",
            [condition, metric],
        )
        for scale, text, value, unit, hardware in found.fetchall():
            labels = json.loads(text)
            if not any(_asks(cell_labels, labels) for cell_labels in printed):
                setting = ", ".join(f"{key} {labels[key]}" for key in labels)
                rows.append([scale, setting, f"{value:,.4g}", unit, hardware])
    title = "Measured at settings that the paper does not print"
    header = ["scale", "setting", "figure", "unit", "hardware"]
    return [Grid(title=title, header=header, rows=rows)] if rows else []


def _asks(printed: dict, labels: dict) -> bool:
    return all(
        str(labels.get(key)).lower() == str(value).lower()
        for key, value in printed.items()
        if key != "path"
    )
