"""`mol store`: build, verify, export and query the database."""

import argparse
import json
import re
import tempfile
from pathlib import Path

import duckdb

from mol.base import UserError, printable, read_text, reason_of
from mol.plan.experiments import PAPER
from mol.store.export import connect, difference, digests, export

DAMAGE = (duckdb.IOException, duckdb.FatalException, duckdb.InternalException)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="read every record, write the database")
    verify = actions.add_parser("verify", help="rebuild beside the database and compare")
    export_ = actions.add_parser("export", help="every table as a file, rows in a stable order")
    query = actions.add_parser("query", help="run one SELECT statement")
    for action in (build, verify, export_, query):
        action.add_argument("--db", type=Path, default=Path("results/mol.duckdb"))
        action.add_argument("--json", action="store_true", help="print JSON")
    for action in (build, verify):
        action.add_argument("--runs", type=Path, default=Path("results/runs"))
        action.add_argument("--records", type=Path, default=Path("results/records"))
        action.add_argument("--paper", type=Path, default=PAPER, help="folder of the paper's data")
    export_.add_argument("--format", choices=("parquet", "csv"), default="parquet")
    export_.add_argument("--out", type=Path, required=True, help="folder to write to")
    query.add_argument("sql", metavar="SQL", help="a SELECT statement, or a file that holds one")


def run(args: argparse.Namespace) -> int:
    return {"build": _build, "verify": _verify, "export": _export, "query": _query}[args.action](
        args
    )


def _build(args: argparse.Namespace) -> int:
    from mol.store.ingest import build

    refused = build(args.db, args.runs, args.records, args.paper)
    with connect(args.db) as database:
        runs, curves = database.execute(
            "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM curves)"
        ).fetchone()
    report = {"database": str(args.db), "runs": runs, "points": curves, "refused": len(refused)}
    _print(report, args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from mol.store.ingest import build

    connect(args.db).close()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "mol.duckdb"
        build(fresh, args.runs, args.records, args.paper)
        found = difference(args.db, fresh)
    _print({"database": str(args.db), "equal": found is None, "difference": found}, args.json)
    return 0 if found is None else 1


def _export(args: argparse.Namespace) -> int:
    paths = export(args.db, args.out, args.format)
    report = {
        str(path): digest for path, digest in zip(paths, digests(paths).values(), strict=True)
    }
    _print(report, args.json)
    return 0


def _print(report: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(f"{key}: {value}" for key, value in report.items() if value is not None))


def _statement(sql: str) -> str:
    if sql.endswith(".sql"):
        try:
            return read_text(Path(sql))
        except (OSError, ValueError) as error:
            raise UserError(f"{sql}: {reason_of(error)}") from None
    return sql


def _query(args: argparse.Namespace) -> int:
    sql = _statement(args.sql)
    with connect(args.db) as database:
        # A statement may not reach other files, nor change settings to be able to.
        database.execute("SET enable_external_access = false; SET lock_configuration = true")
        try:
            statements = database.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UserError("only one SELECT statement is allowed")
            result = database.execute(statements[0])
            columns = [column[0] for column in result.description]
            rows = result.fetchall()
        except duckdb.Error as error:
            message = re.sub(r"\s+", " ", str(error).split("\n\n")[0])
            if isinstance(error, DAMAGE):
                message += f"; {args.db} is damaged: run `mol store build`"
            raise UserError(message) from None
    if args.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str))
    else:
        _table(columns, rows)
    return 0


def _table(columns: list[str], rows: list[tuple]) -> None:
    from rich.table import Table
    from rich.text import Text

    from mol.terminal import console

    table = Table()
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row))
    console().print(table)
