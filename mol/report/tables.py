"""The paper's tables with our figures beside its own, as Markdown, LaTeX and CSV."""

from collections import Counter
from pathlib import Path

import duckdb

from mol.base import write_atomic
from mol.report.footnotes import Footnotes, footnotes, load_runs
from mol.report.grids import Grid, extra_grid, grids_of, text_grid
from mol.report.markup import csv_text, markdown, markdown_table, tex_table
from mol.report.view import SCALES, View, load_views

CSV_HEADER = [
    "cell_id", "place", "row", "column", "kind", "unit", "reported", *reversed(SCALES),
    "difference", "difference_nats", "half_width", "verdict", "gpu_hours", "data", "hardware",
    "note",
]  # fmt: skip


def write_tables(db_path: Path, folder: Path) -> list[Path]:
    """Write tableNN.{md,csv,tex} for every table of the paper and text.{md,csv} for the numbers
    in its sentences. Returns the files. Raises UserError without a database."""
    from mol.store.export import connect

    written = []
    with connect(db_path) as database:
        views = load_views(database)
        titles = _titles(database)
        runs = load_runs(database)
        numbers = dict.fromkeys(view.cell["table"] for view in views)
        for table in sorted(numbers, key=lambda name: (not name.isdigit(), name.zfill(3))):
            own = [view for view in views if view.cell["table"] == table]
            stem = f"table{int(table):02d}" if table.isdigit() else table
            title = f"Table {table}" if table.isdigit() else "Numbers in the text"
            title += f": {titles[table]}" if titles.get(table) else ""
            below = footnotes(own, runs)
            if table == "text":
                grids = [text_grid(own, below.marks)]
            else:
                grids = grids_of(own, below.marks) + extra_grid(database, own)
            files = {
                "md": _markdown(title, grids, _state(own), below),
                "csv": csv_text(CSV_HEADER, _csv(own)),
            }
            if table != "text":
                files["tex"] = "\n".join(
                    tex_table(grid.header, grid.rows, f"{title}. {grid.title}".strip(". "))
                    for grid in grids
                )
            for ending, content in files.items():
                path = Path(folder) / f"{stem}.{ending}"
                write_atomic(path, content)
                written.append(path)
    return written


def _titles(database: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Table -> titles of the experiments behind it."""
    rows = database.execute(
        "SELECT \"table\", string_agg(title, ', ' ORDER BY experiment) FROM "
        '(SELECT DISTINCT "table", experiment, title FROM cells JOIN experiments '
        "USING (experiment) WHERE kind = 'measured' AND \"table\" <> 'text') GROUP BY 1"
    )
    return dict(rows.fetchall())


def _state(views: list[View]) -> str:
    """How many of the measured cells have a figure, and the verdicts."""
    measured = [view for view in views if view.cell["kind"] == "measured"]
    if not measured:
        return "No measured cell."
    parts = [f"{len(measured)} measured cells"]
    for scale in SCALES:
        count = sum(bool(view.figure(scale)) for view in measured)
        if count:
            parts.append(f"{count} with a figure at scale {scale}")
    missing = sum(not any(view.figure(scale) for scale in SCALES) for view in measured)
    if missing:
        parts.append(f"{missing} without a figure of ours")
    verdicts = Counter(view.verdict for view in measured)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"{', '.join(parts)}. Verdicts: {counts}."


def _markdown(title: str, grids: list[Grid], state: str, below: Footnotes) -> str:
    parts = [f"# {markdown(title)}\n"]
    for grid in grids:
        heading = f"**{markdown(grid.title)}**\n\n" if grid.title else ""
        parts.append(heading + markdown_table(grid.header, grid.rows))
    lines = [f"- {markdown(note)}" for note in (state, *below.notes)]
    for scale, notes in below.scoring.items():
        lines.append(f"- Scored at scale {scale} with:")
        lines += [f"  - {markdown(note)}" for note in notes]
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _csv(views: list[View]) -> list[list[str]]:
    lines = []
    for view in views:
        cell, best = view.cell, view.best or view.rows.get("paper", {})
        numbers = [best.get(key) for key in ("difference_nats", "half_width")]
        lines.append(
            [
                cell["cell_id"], cell["place"], cell["row"], cell["column"], cell["kind"],
                cell["unit"], view.reported, *(view.figure(scale) for scale in reversed(SCALES)),
                "" if best.get("difference") is None else view.difference.split(" (")[0],
                *("" if number is None else f"{number:.6g}" for number in numbers),
                view.verdict, "" if view.cost is None else f"{view.cost:.3g}",
                best.get("data") or "", best.get("hardware") or "", best.get("note") or "",
            ]
        )  # fmt: skip
    return lines
