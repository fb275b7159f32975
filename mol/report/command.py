"""`mol report`: tables, figures and the page, all from the database; and the audit page."""

import gc
import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--db", type=Path, default=Path("results/mol.duckdb"), metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("paper_tables"), metavar="FOLDER")
    parser.add_argument("--figures", type=Path, default=Path("figures"), metavar="FOLDER")
    parser.add_argument(
        "--audit-page", type=Path, metavar="FILE",
        help="write only this Markdown page, from the shipped records and no database",
    )  # fmt: skip
    parser.add_argument("--paper", type=Path, metavar="FOLDER", help="of another paper's data")
    parser.add_argument("--records", type=Path, default=Path("results/records"), metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")


def run(args: Namespace) -> int:
    """Write everything; prints the files, or how many. Raises UserError without a database."""
    from mol.plan.experiments import PAPER, load_experiments

    paper = args.paper or PAPER
    if args.audit_page:
        from mol.report.audit_page import write_audit_page

        _print([write_audit_page(args.audit_page, args.records, paper)], args.json)
        return 0
    # Drawn into files, whatever backend the environment asks for, were there none of its name.
    os.environ["MPLBACKEND"] = "agg"
    from mol.report.figures import write_figures
    from mol.report.ledger import ledger_rows
    from mol.report.page import Extras, write_page
    from mol.report.protocols import protocol_rows
    from mol.report.source import Source
    from mol.report.tables import write_tables

    source = Source(args.db)
    gc.freeze()  # its rows stay to the end; the collector would walk through them again and again
    tables = write_tables(args.db, args.out)
    figures = write_figures(source, args.figures, paper)
    plan = load_experiments(paper)
    extras = Extras(
        counts=_counts(paper / "counts.toml"),
        settings=ledger_rows(paper, source.table("effects")),
        protocols=protocol_rows(args.db, paper),
        title=plan.title,
        task_versions=plan.task_versions,
        steps={slug: plan.recipes[c.recipe].optim.steps for slug, c in plan.conditions.items()},
    )
    page = write_page(source, figures, extras, args.out)
    files = [*tables, page, *(path for figure in figures for path in (figure.svg, figure.png))]
    _print(files, args.json)
    return 0


def _print(files: list[Path], as_json: bool) -> None:
    if as_json:
        print(json.dumps([str(path) for path in files], indent=1))
    else:
        pages = [str(path) for path in files if path.suffix == ".html"] or [str(files[-1])]
        print(f"{len(files)} file{'s' if len(files) != 1 else ''}; open {pages[0]}")


def _counts(path: Path) -> list[dict]:
    """Parameter counts computed against printed; none for a paper that prints none."""
    from mol.model.counts import paper_rows

    return paper_rows(path) if path.is_file() else []
