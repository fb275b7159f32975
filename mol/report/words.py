"""Checks and claims in words, for the terminal and for the pages."""

from collections.abc import Iterable
from typing import Any

import duckdb

from mol.report.number import figure_text
from mol.report.view import rows

Row = dict[str, Any]


def load_checks(database: duckdb.DuckDBPyConnection, *verdicts: str) -> list[Row]:
    """Checks of these verdicts in the paper's order, each with its cell's experiment and table."""
    sql = (
        'SELECT checks.*, cells.experiment, cells."table" FROM checks LEFT JOIN cells '
        "USING (cell_id) WHERE list_contains(?, verdict) ORDER BY checks.rowid"
    )
    return rows(database, sql, list(verdicts))


def merged(checks: Iterable[Row]) -> list[list[Row]]:
    """Checks that follow from the same numbers in the same way stand together."""
    groups: dict[tuple, list[Row]] = {}
    for check in checks:
        key = (check["what"], check["expr"], str(check["inputs"]), check["reading"])
        groups.setdefault(key, []).append(check)
    return list(groups.values())


def printed_at(group: list[Row]) -> str:
    """Places of the number in question and what stands there: "5.5, 5.6: 64K-128K"."""
    found: dict[str, list[str]] = {}
    for check in group:
        found.setdefault(check["printed"], []).append(check["place"])
    return "; ".join(
        f"{', '.join(dict.fromkeys(places))}: {printed}" for printed, places in found.items()
    )


def sources(check: Row) -> str:
    """Places of the inputs with what stands there: "Table 12: ~65, 26.5"."""
    found: dict[str, list[str]] = {}
    for source in check["inputs"]:
        found.setdefault(source["place"], []).append(source["printed"])
    return "; ".join(f"{place}: {', '.join(printed)}" for place, printed in found.items())


def recomputed(check: Row) -> str:
    """The value that the inputs give, with the interval that their rounding leaves."""
    if check["value"] is None:
        return ""
    low, high, value = (figure_text(check[key]) for key in ("low", "high", "value"))
    return value if low == high else f"{value} ({low} to {high})"


def effect_text(claim: Row) -> str:
    """The effect of a claim with its 95 % interval: "-0.012 nat (-0.02 to -0.004), n = 3"."""
    if claim["effect"] is None:
        return ""
    low = "-∞" if claim["low"] is None else figure_text(claim["low"], 3)
    high = "∞" if claim["high"] is None else figure_text(claim["high"], 3)
    effect = f"{figure_text(claim['effect'], 3)} {claim['unit'] or ''}".strip()
    return f"{effect} ({low} to {high}), n = {claim['n']}"
