"""What stands below a table: whose text and machine each figure came from, and what to know."""

import json
import re
from dataclasses import dataclass
from typing import Any

import duckdb

from mol.report.view import SCALES, View

APART = {
    "smoke": "No difference is given for figures at scale smoke: neither the width of their models "
    "nor their training, text and machine are the paper's.",
    "proxy": "At scale proxy a difference of perplexities is given in nats, and none where the "
    "text, the vocabulary, the machine or the length of training decides the figure.",
}


@dataclass(frozen=True, kw_only=True)
class Footnotes:
    """`marks`: cell_id -> numbers of its footnotes. `scoring`: how zero-shot was scored."""

    marks: dict[str, list[int]]
    notes: list[str]
    scoring: dict[str, list[str]]  # by scale


def load_runs(database: duckdb.DuckDBPyConnection) -> dict[str, dict[str, Any]]:
    """run_id -> kind and notes; a note that repeats the text's source is left out."""
    rows = database.execute("SELECT run_id, kind, notes FROM runs").fetchall()
    return {
        run_id: {"kind": kind, "notes": [n for n in json.loads(notes) if n[:6] != "text: "]}
        for run_id, kind, notes in rows
    }


def footnotes(views: list[View], runs: dict[str, dict[str, Any]]) -> Footnotes:
    """Footnotes of one table; cells with the same text, machine and notes share one."""
    numbers: dict[str, int] = {}
    marks: dict[str, list[int]] = {}
    scoring: dict[str, list[str]] = {}
    for view in views:
        for scale in reversed(SCALES):
            row = view.rows.get(scale)
            if not row or not row["n_runs"]:
                continue
            parts = [f"scale {scale}", row["data"] and f"text: {row['data']}", row["hardware"]]
            for run in row["runs"]:
                scored = runs[run]["kind"] == "zeroshot"
                target = scoring.setdefault(scale, []) if scored else parts
                target += [note for note in runs[run]["notes"] if note not in target]
            text = "; ".join(filter(None, parts))
            number = numbers.setdefault(text, len(numbers) + 1)
            marks.setdefault(view.cell["cell_id"], []).append(number)
    notes = [f"[{number}] {text}." for text, number in numbers.items()]
    shown = [view.best for view in views if view.cell["kind"] != "count" and view.best]
    notes += [text for scale, text in APART.items() if any(r["scale"] == scale for r in shown)]
    # A task that was left out says so in its own row.
    told = {
        scale: [note for note in found if not re.match(r"\w+: not run, ", note)]
        for scale, found in scoring.items()
    }
    return Footnotes(marks=marks, notes=notes, scoring=told)
