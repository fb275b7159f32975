"""Answers of the database as mappings."""

from typing import Any

import duckdb


def mappings(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """The lines of an executed query, each by the names of its columns."""
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, line, strict=True)) for line in cursor.fetchall()]
