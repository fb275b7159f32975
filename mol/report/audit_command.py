"""`mol audit`: what our runs say about the paper's numbers and claims, and where the paper
contradicts itself; all from the database."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from mol.base import UserError
from mol.report.view import SCALES, View, load_views, rows
from mol.report.words import effect_text, load_checks, merged, printed_at, recomputed, sources

Row = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--db", type=Path, default=Path("results/mol.duckdb"), metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--claims", action="store_true", help="the claims instead of the numbers")
    shown.add_argument(
        "--contradictions", action="store_true", help="where the paper contradicts itself instead"
    )
    parser.add_argument("--experiment", metavar="ID", help="only this experiment, such as E06")
    parser.add_argument("--scale", choices=SCALES[::-1], help="only what has a row at this scale")
    parser.add_argument("--table", metavar="N", help="only this table, or text")
    parser.add_argument("--verdict", help="only this verdict or outcome, for example 'not run'")
    parser.add_argument("--kind", choices=("measured", "count", "derived"))


def row_of(view: View, scale: str | None) -> Row:
    """A cell as a flat row; its figure is the given scale's, else the most telling one."""
    cell = view.cell
    best = (view.rows.get(scale) if scale else view.best) or {}
    of_cell = ("cell_id", "table", "place", "experiment", "row", "column", "kind", "unit")
    of_figure = ("scale", "reproduced", "difference", "difference_nats", "half_width", "parts",
                 "n_runs", "runs", "hardware", "data", "note")  # fmt: skip
    return {
        **{key: cell[key] for key in of_cell},
        "reported": view.reported,
        "verdict": view.verdict,
        **{key: best.get(key) for key in of_figure},
        "judgement": view.rows.get("paper", {}).get("note"),
        "cost_gpu_hours": view.cost,
    }


def _checked(option: str, value: str | None, present: list[str]) -> None:
    """Raises UserError that lists what is there."""
    if value and value not in present:
        raise UserError(f"--{option} {value!r}: present are {', '.join(dict.fromkeys(present))}")


def _numbers(views: list[View], args: argparse.Namespace) -> list[View]:
    shown = [view for view in views if view.cell["kind"] != "setting"]
    _checked("verdict", args.verdict, sorted({view.verdict for view in shown if view.verdict}))
    return [
        view
        for view in shown
        if args.table in (None, view.cell["table"])
        and args.verdict in (None, view.verdict)
        and args.kind in (None, view.cell["kind"])
        and args.experiment in (None, view.cell["experiment"])
        and (not args.scale or args.scale in view.rows)
    ]


def _claims(found: list[Row], args: argparse.Namespace) -> list[Row]:
    _checked("verdict", args.verdict, sorted({row["outcome"] for row in found}))
    return [
        row
        for row in found
        if args.verdict in (None, row["outcome"])
        and args.scale in (None, row["scale"])
        and args.experiment in (None, row["experiment"])
        and (not args.table or _names_table(row["place"], args.table))
    ]


def _contradictions(found: list[Row], args: argparse.Namespace) -> list[Row]:
    return [
        row
        for row in found
        if args.experiment in (None, row["experiment"])
        and (not args.table or _names_table(f"{row['place']}; {sources(row)}", args.table))
    ]


def _names_table(places: str, table: str) -> bool:
    return bool(re.search(rf"\bTables? (\d+, )*{re.escape(table)}\b", places))


def run(args: argparse.Namespace) -> int:
    from mol.store.export import connect

    with connect(args.db) as database:
        views = load_views(database)
        claims = rows(database, "SELECT * FROM claim_results ORDER BY rowid")
        contradicted = load_checks(database, "contradicted")
        refused = database.execute("SELECT count(*) FROM refused").fetchone()[0]
        names = [row["experiment"] for row in rows(database, "SELECT experiment FROM experiments")]
    _checked("experiment", args.experiment, names)
    _checked("table", args.table, [v.cell["table"] for v in views if v.cell["kind"] != "setting"])
    if args.claims:
        chosen = _claims(claims, args)
    elif args.contradictions:
        chosen = _contradictions(contradicted, args)
    else:
        chosen = _numbers(views, args)
    if args.json:
        plain = chosen if args.claims or args.contradictions else [
            row_of(view, args.scale) for view in chosen
        ]  # fmt: skip
        print(json.dumps(plain, indent=1))
    elif args.claims:
        _print_claims(chosen)
    elif args.contradictions:
        _print_contradictions(chosen)
    else:
        _print_summary(chosen, claims, len(contradicted), refused)
        _print_numbers(chosen, args.scale)
    return 0


def _print_summary(views: list[View], claims: list[Row], contradicted: int, refused: int) -> None:
    for kind, title in (
        ("measured", "Measured, by our runs"),
        ("count", "Counted, from the configurations"),
        ("derived", "Derived, from the paper's other numbers"),
    ):
        counts = Counter(v.verdict or "no check" for v in views if v.cell["kind"] == kind)
        if counts:
            parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
            print(f"{title}: {parts}")
    for scale in SCALES[::-1]:
        outcomes = Counter(row["outcome"] for row in claims if row["scale"] == scale)
        if outcomes:
            parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            print(f"Claims at scale {scale}: {parts} (mol audit --claims)")
    if contradicted:
        print(f"The paper contradicts itself in {contradicted} checks (mol audit --contradictions)")
    if refused:
        print(f"{refused} records or curves were refused; see table refused")


def _print_table(headings: dict[str, str], lines: list[list]) -> None:
    """A table on the terminal; a cell is text, or (text, style)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from mol.terminal import console

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, justify in headings.items():
        table.add_column(heading, justify=justify, overflow="fold")
    for line in lines:
        table.add_row(*(Text(*cell) if isinstance(cell, tuple) else Text(cell) for cell in line))
    console(80).print(table)


def _print_numbers(views: list[View], scale: str | None) -> None:
    lines = []
    for view in views:
        best = (view.rows.get(scale) if scale else view.best) or {}
        shown = best.get("scale") or next(filter(view.figure, SCALES), "")
        number = ", ".join(filter(None, (view.cell["row"], view.cell["column"])))
        texts = [view.cell["place"], number, view.reported, view.figure(shown), shown]
        lines.append([*texts, view.difference_of(best), (view.state, _style(view.verdict))])
    left, right = "left", "right"
    headings = {"place": left, "number": left, "reported": right, "ours": right, "scale": left,
                "difference": right, "verdict": left}  # fmt: skip
    _print_table(headings, lines)


def _print_claims(claims: list[Row]) -> None:
    lines = [
        [
            claim["place"], claim["text"], claim["scale"],
            (claim["outcome"], _style(claim["outcome"])),
            effect_text(claim) or claim["needs"] or claim["note"] or "",
        ]
        for claim in claims
    ]  # fmt: skip
    names = ("place", "claim", "scale", "outcome", "effect (95 %), or what decides it")
    _print_table(dict.fromkeys(names, "left"), lines)


def _print_contradictions(checks: list[Row]) -> None:
    lines = [
        [printed_at(group), sources(group[0]), recomputed(group[0]), group[0]["reading"]]
        for group in merged(checks)
    ]
    names = ("printed", "against", "gives", "reading")
    _print_table(dict.fromkeys(names, "left"), lines)


def _style(verdict: str) -> str:
    return {
        "reproduced": "green", "agrees": "green", "holds": "green", "not reproduced": "bold red",
        "contradicted": "bold red", "does not hold": "bold red", "under-powered": "yellow",
        "undecided": "yellow",
    }.get(verdict, "")  # fmt: skip
