"""`mol check-paper`: recompute the paper's derived numbers from its own printed ones."""

import argparse
import json
from collections import Counter
from pathlib import Path

from mol.base import printable
from mol.paper.derivations import Row, check_paper
from mol.paper.reported import PAPER, load_paper


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--all", action="store_true", help="also list what agrees")
    parser.add_argument("--paper", type=Path, default=PAPER, help="folder of another paper's data")


def run(args: argparse.Namespace) -> int:
    rows = check_paper(load_paper(args.paper))
    if args.json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
        return 0
    for row in rows:
        if args.all or row.verdict != "agrees":
            print(_paragraph(row))
    for kind, label in (("check", "checks"), ("flag", "statements weaker than their wording")):
        counts = Counter(row.verdict for row in rows if row.kind == kind)
        parts = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        print(f"{sum(counts.values())} {label}: {parts}")
    return 0


def _paragraph(row: Row) -> str:
    """One row as text: what is printed where, what comes out, from what, what it means."""
    head = ", ".join(filter(None, (row.place, row.printed)))
    lines = [f"{row.verdict}: {head}" + (f" ({row.what})" if row.what else "")]
    if row.value is not None:
        origins = ", ".join(dict.fromkeys(f"{i.printed} ({i.place})" for i in row.inputs))
        lines.append(f"{row.value:.5g} [{row.low:.5g}, {row.high:.5g}] from {origins}")
    if row.reading:
        lines.append(row.reading)
    return "\n    ".join(map(printable, lines)) + "\n"
