"""`mol report`: tables, figures and the page, all from the database."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--db", type=Path, default=Path("results/mol.duckdb"), metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("paper_tables"), metavar="FOLDER")
    parser.add_argument("--figures", type=Path, default=Path("figures"), metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")


def run(args: Namespace) -> int:
    """Write everything; prints the files, or how many."""
    from mol.report.figures import write_figures
    from mol.report.page import Extras, write_page
    from mol.report.source import Source

    source = Source(args.db)
    figures = write_figures(source, args.figures)
    page = write_page(source, figures, Extras(), args.out)
    files = [page, *(path for figure in figures for path in (figure.svg, figure.png))]
    if args.json:
        print(json.dumps([str(path) for path in files], indent=1))
    else:
        print(f"{len(files)} files; open {page}")
    return 0
