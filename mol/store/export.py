"""The database as ordered files, its content hash, and the comparison of two databases."""

import itertools
import tempfile
from pathlib import Path

import duckdb

from mol.base import UserError, reason_of, sha256_file, whole


def connect(db_path: Path) -> duckdb.DuckDBPyConnection:
    """Open the database to read. Raises UserError that says how to build a missing one."""
    if not Path(db_path).is_file():
        raise UserError(
            f"{db_path}: no database; run `snakemake --cores all paper_tables` or `mol store build`"
        )
    try:
        return duckdb.connect(db_path, read_only=True)
    except duckdb.Error as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{db_path}: {first}; delete it and run `mol store build`") from None


def table_names(database: duckdb.DuckDBPyConnection) -> list[str]:
    rows = database.execute(
        "SELECT table_name FROM duckdb_tables() WHERE NOT internal ORDER BY table_name"
    )
    return [name for (name,) in rows.fetchall()]


def export(db_path: Path, folder: Path, file_format: str) -> list[Path]:
    """One csv or parquet file a table, rows ordered by all columns: equal content, equal bytes."""
    folder = Path(folder)
    options = {"csv": "FORMAT csv, HEADER", "parquet": "FORMAT parquet, COMPRESSION zstd"}
    # A file that DuckDB renames over ours would not be locked: another export took it for remains.
    options = {key: f"{value}, USE_TMP_FILE false" for key, value in options.items()}
    paths = []
    with connect(db_path) as database:
        database.execute("SET threads = 1")  # several writers would cut row groups unevenly
        for name in table_names(database):
            path = folder / f"{name}.{file_format}"
            with whole(path) as part:
                _copy(database, name, part, options[file_format])
            paths.append(path)
    return paths


def _copy(database: duckdb.DuckDBPyConnection, name: str, part: Path, options: str) -> None:
    """OSError where the disk refuses the file; other errors are the database's."""
    target = str(part).replace("'", "''")
    try:
        database.execute(f"COPY (SELECT * FROM \"{name}\" ORDER BY ALL) TO '{target}' ({options})")
    except duckdb.IOException as error:
        if part.name not in str(error):
            raise
        raise OSError(reason_of(error)) from None


def digests(paths: list[Path]) -> dict[str, str]:
    """Table name -> SHA-256 of its exported file."""
    return {path.stem: sha256_file(path) for path in paths}


def difference(left: Path, right: Path) -> str | None:
    """None where the ordered exports of two databases agree byte for byte, else one line that
    names the first table and row that differ."""
    with tempfile.TemporaryDirectory() as scratch:
        exports = [
            {path.stem: path for path in export(database, Path(scratch) / side, "csv")}
            for side, database in (("left", left), ("right", right))
        ]
        for name in sorted(exports[0].keys() | exports[1].keys()):
            if name not in exports[0] or name not in exports[1]:
                return f"table {name} is in one of the two only"
            with open(exports[0][name], "rb") as one, open(exports[1][name], "rb") as other:
                for number, (a, b) in enumerate(itertools.zip_longest(one, other, fillvalue=b"")):
                    if a != b:
                        shown = [line.decode().strip()[:200] or "nothing" for line in (a, b)]
                        return f"table {name}, row {number}: {shown[0]} against {shown[1]}"
    return None
