"""Every printed cell with what stands beside it: figures by scale, and one verdict."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import duckdb

from mol.data.config import OWN_TEXT
from mol.report.number import figure_text, like, signed
from mol.report.rows import mappings

SCALES = ("paper", "proxy", "smoke")  # the one that counts most first
OTHER_SCALE = "not run at paper scale"


@dataclass(frozen=True, kw_only=True)
class View:
    """One cell of table `cells`, its rows of `verdicts` by scale, and its derivation's verdict."""

    cell: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    derivation: str | None = None

    @property
    def verdict(self) -> str:
        """The paper scale's for a measured cell, the derivation's for a derived one, else empty."""
        if self.cell["kind"] == "derived":
            return self.derivation or ""
        judged = self.rows.get("paper", {}).get("verdict") or ""
        beside = any(row["verdict"] == OTHER_SCALE for row in self.rows.values())
        return OTHER_SCALE if judged == "not run" and beside else judged

    @property
    def cost(self) -> float | None:
        return self.rows.get("paper", {}).get("cost_gpu_hours")

    @property
    def reason(self) -> str:
        """Why a cell was not run or cannot be judged, in few words; what it costs where known."""
        verdict = self.verdict
        if verdict not in ("not run", "not judgeable here"):
            return ""
        reason = (self.rows["paper"]["note"] or "").split("; ")[0]
        reason = re.sub(r" ?\([^)]*\)", "", reason).replace("`", "")
        cost = "" if self.cost is None else f"{figure_text(self.cost, 2)} GPU-hours"
        unknown = "" if reason or cost or verdict != "not run" else "cost unknown"
        return ", ".join(filter(None, (reason, cost, unknown)))

    @property
    def state(self) -> str:
        """The verdict with its reason."""
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict

    @property
    def reported(self) -> str:
        spread = self.cell["spread"]
        return self.cell["printed"] + (f" ± {spread}" if spread else "")

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the most telling scale that has a figure, be it that a crossover never is."""
        for scale in SCALES:
            if self.figure(scale):
                return self.rows[scale]
        return None

    @property
    def own_text(self) -> bool:
        """Whether the figure shown is of runs on a reader's own text (`mol.data.file`)."""
        return bool(self.best) and (self.best["data"] or "").startswith(OWN_TEXT)

    def figure(self, scale: str) -> str:
        """Our figure at a scale as the paper prints, or empty; a crossover may never happen."""
        row = self.rows.get(scale)
        if row is None:
            return ""
        if row["reproduced"] is None:
            return "never" if (row["note"] or "").startswith("never") and row["n_runs"] else ""
        return like(self.cell["printed"], row["reproduced"])

    @property
    def difference(self) -> str:
        return self.difference_of(self.best)

    def difference_of(self, row: dict[str, Any] | None) -> str:
        """Of the figure in `row`: in printed units, and of a perplexity in nats, as far as it is
        like the printed one."""
        if not row or row["reproduced"] is None:
            return ""
        nats = row["difference_nats"] if self.cell["unit"] == "ppl/token" else None
        in_nats = "" if nats is None else f"{round(nats, 3) + 0.0:+.3f} nat"  # no "-0.000"
        if row["difference"] is None:
            return in_nats
        noise = abs(row["difference"]) < 1e-9 * abs(row["reproduced"])  # of the arithmetic
        printed = signed(self.cell["printed"], 0.0 if noise else row["difference"])
        return f"{printed} ({in_nats})" if in_nats else printed


def load_views(database: duckdb.DuckDBPyConnection) -> list[View]:
    """Cells in printed order."""
    cells = rows(database, "SELECT * FROM cells ORDER BY position")
    by_cell: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows(database, "SELECT * FROM verdicts ORDER BY ALL"):
        by_cell[row["cell_id"]][row["scale"]] = row
    checks = dict(
        database.execute(
            "SELECT cell_id, verdict FROM checks WHERE cell_id IS NOT NULL ORDER BY ALL"
        ).fetchall()
    )
    return [
        View(cell=cell, rows=by_cell[cell["cell_id"]], derivation=checks.get(cell["cell_id"]))
        for cell in cells
    ]


def rows(database: duckdb.DuckDBPyConnection, sql: str, *values: Any) -> list[dict[str, Any]]:
    """The answer to a query as mappings; the database's JSON columns are read."""
    found = mappings(database.execute(sql, list(values)))
    for row in found:
        for key in ("labels", "seeds", "parts", "runs", "inputs", "used", "other"):
            if isinstance(row.get(key), str):
                row[key] = json.loads(row[key])
    return found
