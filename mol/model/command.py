"""`mol counts`: parameter counts of the paper's models, computed against printed."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

_RULES = {
    "total": "total",
    "active_with_delta_extras": "active with DeltaNet extras",
    "active_without_delta_extras": "active without them",
    "extra": "SE gates alone",
    "projection_share": "projection share",
}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of rows as JSON")
    parser.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="count one model: keys of ModelConfig"
    )


def run(args: Namespace) -> int:
    """Print the table. A mismatch with the paper is a finding, not an error: the code is 0."""
    from mol.model.counts import config_rows, paper_rows

    rows = config_rows(args.config) if args.config else paper_rows()
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        _show(rows)
    return 0


def _show(rows: list[dict]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mol.terminal import console

    table = Table("Place", box=SIMPLE_HEAD)
    table.add_column("Configuration", no_wrap=True)
    table.add_column("Rule")
    for name in ("Computed", "Printed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("Match", "How"):
        table.add_column(name)
    for row in rows:
        match = {True: "yes", False: "[bold red]no[/]", None: ""}[row["match"]]
        computed = row["computed"]
        table.add_row(
            row["place"] or "",
            row["configuration"],
            _RULES[row["rule"]],
            f"{computed:,}" if isinstance(computed, int) else f"{100 * computed:.2f}%",
            row["printed"] or "",
            match,
            row["how"] or "",
        )
    out = console(120)
    out.print(table)
    # An active count is printed once and computed under both rules: it agrees if one of them does.
    agrees: dict[tuple, bool] = {}
    for row in rows:
        if row["printed"]:
            rule = "active" if row["rule"].startswith("active") else row["rule"]
            key = (row["place"], row["configuration"], row["printed"], rule)
            agrees[key] = agrees.get(key, False) or row["match"]
    if agrees:
        out.print(
            f"{sum(agrees.values())} of {len(agrees)} printed counts agree",
            "at the printed precision; an active count agrees when one of its two rules does.",
        )
