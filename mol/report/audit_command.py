"""`mol audit`: every printed number with what our runs say about it, from the database."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from mol.base import UserError
from mol.report.view import SCALES, View, load_views


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--db", type=Path, default=Path("results/mol.duckdb"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    parser.add_argument("--scale", choices=SCALES[::-1], help="only cells with a row at this scale")
    parser.add_argument("--table", metavar="N", help="only this table, or text")
    parser.add_argument("--verdict", help="only this verdict, for example 'not run'")
    parser.add_argument("--kind", choices=("measured", "count", "derived"))


def row_of(view: View, scale: str | None) -> dict[str, Any]:
    """A cell as a flat row; its figure is the given scale's, else the most telling one."""
    cell = view.cell
    best = (view.rows.get(scale) if scale else view.best) or {}
    keys = ("reproduced", "difference", "difference_nats", "half_width", "parts", "n_runs", "runs",
            "hardware", "data", "note")  # fmt: skip
    return {
        "cell_id": cell["cell_id"],
        "table": cell["table"],
        "place": cell["place"],
        "row": cell["row"],
        "column": cell["column"],
        "kind": cell["kind"],
        "unit": cell["unit"],
        "reported": view.reported,
        "verdict": view.verdict,
        "scale": best.get("scale"),
        **{key: best.get(key) for key in keys},
        "judgement": view.rows.get("paper", {}).get("note"),
        "cost_gpu_hours": view.cost,
    }


def _chosen(views: list[View], args: argparse.Namespace) -> list[View]:
    shown = [view for view in views if view.cell["kind"] != "setting"]
    tables = dict.fromkeys(view.cell["table"] for view in shown)
    if args.table and args.table not in tables:
        raise UserError(f"--table {args.table}: tables with numbers are {', '.join(tables)}")
    verdicts = dict.fromkeys(view.verdict for view in shown if view.verdict)
    if args.verdict and args.verdict not in verdicts:
        raise UserError(f"--verdict {args.verdict!r}: present are {', '.join(sorted(verdicts))}")
    return [
        view
        for view in shown
        if (not args.table or view.cell["table"] == args.table)
        and (not args.verdict or view.verdict == args.verdict)
        and (not args.kind or view.cell["kind"] == args.kind)
        and (not args.scale or args.scale in view.rows)
    ]


def run(args: argparse.Namespace) -> int:
    from mol.store.export import connect

    with connect(args.db) as database:
        views = load_views(database)
        refused = database.execute("SELECT count(*) FROM refused").fetchone()[0]
        claims = database.execute(
            "SELECT scale, outcome, count(*) FROM claim_results WHERE outcome <> 'not run' "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    chosen = _chosen(views, args)
    if args.json:
        print(json.dumps([row_of(view, args.scale) for view in chosen], indent=1))
    else:
        _print(chosen, args.scale, refused, claims)
    return 0


def _print(
    views: list[View], scale: str | None, refused: int, claims: list[tuple[str, str, int]]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for kind, title in (
        ("measured", "Measured, by our runs"),
        ("count", "Counted, from the configurations"),
        ("derived", "Derived, from the paper's other numbers"),
    ):
        counts = Counter(v.verdict or "no check" for v in views if v.cell["kind"] == kind)
        if counts:
            parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
            console.print(Text(f"{title}: {parts}"))
    for name in dict.fromkeys(scale for scale, _, _ in claims):
        parts = ", ".join(f"{count} {outcome}" for at, outcome, count in claims if at == name)
        console.print(Text(f"Claims at scale {name}: {parts}"))
    if refused:
        console.print(Text(f"{refused} records or curves were refused; see table refused"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("place", "number", "reported", "ours", "scale", "difference", "verdict"):
        right = heading in ("reported", "ours", "difference")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for view in views:
        best = (view.rows.get(scale) if scale else view.best) or {}
        shown = best.get("scale") or next(filter(view.figure, SCALES), "")
        number = ", ".join(filter(None, (view.cell["row"], view.cell["column"])))
        texts = [view.cell["place"], number, view.reported, view.figure(shown), shown]
        texts += [view.difference_of(best), view.state]
        table.add_row(*(Text(text) for text in texts[:-1]), Text(view.state, _style(view.verdict)))
    console.print(table)


def _style(text: str) -> str:
    return {
        "reproduced": "green", "agrees": "green", "not reproduced": "bold red",
        "contradicted": "bold red", "under-powered": "yellow",
    }.get(text, "")  # fmt: skip
