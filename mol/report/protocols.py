"""Which protocols, if any, land a checkpoint on a number that the paper prints for it.

Landing means |d| <= h with the verdicts' own d and h (rounding, seeds, sampling error). Only runs
at the paper's scale on the paper's own text are compared, and only perplexities of its unit,
tokenizer and split; every other row is shown as what it is.
"""

from pathlib import Path
from typing import Any

import duckdb

from mol.base import UserError
from mol.paper.cell import METRICS, Cell
from mol.paper.reported import load_paper
from mol.plan.experiments import PAPER, load_experiments
from mol.report.judge import Context
from mol.report.rows import mappings
from mol.report.verdicts import Figure, Protocol, Sample, judge
from mol.store.export import connect

Row = dict[str, Any]


def protocol_rows(db: Path, folder: Path = PAPER) -> list[Row]:
    """Rows of table `protocols` with their run (scale, condition, seed), in the order scored.

    Added: `compared`, one {cell_id, place, printed, difference_nats, half_width, lands} a printed
    number (which may stand in several places) that the row may be compared with, and `outcome`,
    the same in words or why not. Empty where no matrix was scored. Raises UserError without a
    database.
    """
    with connect(db) as database:
        rows = _read(database)
    paper = load_paper(folder)
    context = Context(paper.cells, load_experiments(folder))
    printed: dict[str, list[Cell]] = {}
    for cell in paper.cells:
        if METRICS.get(cell.metric) == "ppl/token" and cell.kind == "measured" and not cell.op:
            printed.setdefault(cell.condition, []).append(cell)
    for row in rows:
        reason = _not_comparable(row)
        row["compared"], row["outcome"] = [], reason
        if not reason:
            _compare(row, printed.get(row["condition"], []), context)
    return rows


def headline(rows: list[Row]) -> str:
    """One sentence on the whole matrix."""
    if not rows:
        return "No checkpoint was scored under every protocol; `snakemake protocols` does it."
    runs = len({row["run_id"] for row in rows})
    start = f"{len(rows)} figures of {runs} checkpoint{'s' if runs > 1 else ''}; "
    compared = [row for row in rows if row["compared"]]
    if not compared:
        scales = ", ".join(sorted({row["scale"] for row in rows}))
        return f"{start}none is compared with a printed number ({scales} scale)."
    landing = sum(any(match["lands"] for match in row["compared"]) for row in compared)
    return f"{start}{len(compared)} compared with printed numbers, {landing} land on one."


def _read(database: duckdb.DuckDBPyConnection) -> list[Row]:
    try:
        cursor = database.execute(
            "SELECT p.*, scale, condition, seed, spec->>'$.data.source.kind' AS source "
            "FROM protocols p JOIN runs USING (run_id) ORDER BY run_id, p.rowid"
        )
    except duckdb.CatalogException:  # a database from before the table
        return []
    return mappings(cursor)


def _not_comparable(row: Row) -> str:
    """Why a row is compared with nothing, whatever the paper prints; empty if it may be."""
    if row["value"] is None:
        return "not scored"
    if row["scale"] != "paper":
        return f"not compared: {row['scale']} scale"
    if row["source"] != "hub":
        return "not compared: not the paper's text"
    return "" if row["unit"] == "ppl/token" else f"not compared: other unit ({row['unit']})"


def _compare(row: Row, cells: list[Cell], context: Context) -> None:
    kind = row["tokenizer"].split(":")[0]
    mine = Protocol(unit=row["unit"], split=row["split"], tokenizer=kind, pad=row["pad"])
    figure = Figure(
        value=row["value"], samples=(Sample(values=(row["value"],)),), stderr=row["stderr"]
    )
    unlike, alike = [], {}  # alike: what is printed -> the cells that print it
    for cell in cells:
        if row["seed"] not in cell.seeds or cell.number.bound:
            continue
        try:
            context.protocol(cell).check_alike(mine, cell.cell_id)
        except UserError as error:
            unlike.append(str(error))
        else:
            alike.setdefault((cell.printed, cell.spread, cell.n_seeds), []).append(cell)
    for same in alike.values():
        found = judge(
            context.printed(same[0]),
            figure,
            log=True,
            timing=False,
            borrowed=context.borrowed(same[0], row["value"]),
            nearest=None,
        )
        row["compared"].append(
            {
                "cell_id": same[0].cell_id,
                "place": ", ".join(dict.fromkeys(cell.place for cell in same)),
                "printed": same[0].printed,
                "difference_nats": found.difference,
                "half_width": found.half_width,
                "lands": abs(found.difference) <= found.half_width,
            }
        )
    landing = [f"{m['printed']} ({m['place']})" for m in row["compared"] if m["lands"]]
    if landing:
        row["outcome"] = f"lands on {', '.join(landing)}"
    elif row["compared"]:
        row["outcome"] = "lands on no printed number"
    else:
        row["outcome"] = f"not compared: {unlike[0] if unlike else 'the paper prints none'}"
