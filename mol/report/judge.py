"""Judge every cell at every scale that has runs, and write table `verdicts`.

Only runs at the paper's scale judge a measured cell; figures of other scales stand beside it.
"""

import math
from collections.abc import Iterator
from typing import Any

from mol.base import UserError, canonical_json
from mol.paper.cell import METRICS, Cell
from mol.plan.experiments import Paper
from mol.report.alike import NO_NAME, compared_in, is_machine_bound, is_perplexity, is_timing
from mol.report.compare import Reproduced, is_log, reproduce
from mol.report.cost import gpu_hours
from mol.report.counted import counted_row
from mol.report.query import same_hardware
from mol.report.readings import Runs, text_of
from mol.report.verdicts import Borrowed, Printed, Protocol, judge, to_difference

OTHER_SCALE = "not run at paper scale"


class Context:
    """What judging one cell needs to know about the others, and about its own condition."""

    def __init__(self, cells: tuple[Cell, ...], plan: Paper):
        self.cells, self.plan = cells, plan
        recipes = {slug: plan.recipes[c.recipe] for slug, c in plan.conditions.items()}
        self.corpus_of = {slug: recipe.corpus for slug, recipe in recipes.items()}
        self._tokenizer_of = {slug: recipe.tokenizer for slug, recipe in recipes.items()}
        self._spreads: dict[str, float] = {}  # condition -> relative seed spread, as printed
        for cell in cells:
            if METRICS.get(cell.metric) == "ppl/token" and not cell.op and (cell.n_seeds or 1) > 1:
                if cell.deviation:
                    self._spreads[cell.condition] = cell.deviation.value / cell.number.value

    def protocol(self, cell: Cell) -> Protocol:
        """What the paper says of how a perplexity was computed."""
        return Protocol(
            unit=METRICS[cell.metric],
            split=cell.labels.get("split"),
            tokenizer=self._tokenizer_of.get(cell.condition),
            pad=cell.labels.get("pad"),
        )

    def printed(self, cell: Cell) -> Printed:
        """The printed number as the rule takes it; a range such as 64K-128K rounds by its half."""
        number = cell.number
        return Printed(
            value=number.value,
            half_unit=(number.high - number.low) / 2,
            spread=cell.deviation.value if cell.deviation else None,
            n_seeds=cell.n_seeds or 1,
            borrow=math.sqrt(2) if cell.op else 1.0,
            timing=self._stated_timing(cell),
        )

    def _stated_timing(self, cell: Cell) -> float | None:
        """Run-to-run spread that the cell's own table states, relative."""
        for other in self.cells:
            if (other.table, other.kind) == (cell.table, "setting") and other.unit == "%":
                if other.column.startswith("run-to-run"):
                    return other.number.high / 100
        return None

    def borrowed(self, cell: Cell, level: float) -> Borrowed | None:
        """Sigma for one-seed sides: the printed spread of the same condition, else the largest
        printed for its corpus, else the largest of all, which has no support there. `level`
        turns a relative spread into one of a difference."""
        if is_timing(cell):
            return None
        if not is_perplexity(cell) or not self._spreads:
            return Borrowed(sigma=None, source="no spread of it is printed", supported=False)
        corpus = self.corpus_of.get(cell.condition)
        same = [s for c, s in self._spreads.items() if self.corpus_of.get(c) == corpus]
        if cell.condition in self._spreads:
            sigma, source = self._spreads[cell.condition], "as printed for this condition"
        elif same:
            sigma, source = max(same), f"the largest printed for {corpus}"
        else:
            sigma, source = max(self._spreads.values()), f"of other data than {corpus}"
        in_d = {"diff": level, "percent": 100.0}.get(cell.op, 1.0)
        return Borrowed(
            sigma=sigma * in_d,
            source=f"sigma {100 * sigma:.2f} % {source}",
            supported=bool(same),
        )

    def nearest(self, cell: Cell) -> float | None:
        """Distance in d to the nearest printed alternative: another condition, or another model
        of the same case, in the cell's table (for a sentence, its experiment). For a comparison
        of two conditions no effect at all is an alternative too."""
        here = cell.number.value
        found = []
        if cell.op in ("diff", "percent"):
            found.append(abs(here))
        elif cell.op == "ratio":
            found.append(abs(math.log(here)))
        for other in self.cells:
            if not self._comparable(cell, other) or not self._alternative(cell, other):
                continue
            if not is_log(cell) or other.number.value > 0:
                found.append(abs(to_difference(other.number.value, here, is_log(cell))))
        return min(found, default=None)

    def _comparable(self, cell: Cell, other: Cell) -> bool:
        if other.kind != "measured" or (other.metric, other.unit, other.op, other.hardware) != (
            cell.metric, cell.unit, cell.op, cell.hardware,
        ):  # fmt: skip
            return False
        if cell.table == "text":
            return other.experiment == cell.experiment
        return other.table == cell.table and (other.row == cell.row or other.column == cell.column)

    def _alternative(self, cell: Cell, other: Cell) -> bool:
        if other.condition != cell.condition:
            return other.labels == cell.labels
        differing = {
            key
            for key in (cell.labels.keys() | other.labels.keys()) - {"path"}
            if cell.labels.get(key) != other.labels.get(key)
        }
        which = {"model", "attention"} & cell.labels.keys()
        return differing == which if which else bool(differing)


def _paper_scale(
    cell: Cell, found: Reproduced | None, context: Context, reason: str
) -> tuple[str, dict[str, Any]]:
    """(verdict, further columns) of a measured cell from runs at the paper's scale; `reason`
    says why there is none, where that is known."""
    if not cell.metric:
        return "not judgeable here", {"note": "no run of this suite measures it"}
    # A length that nobody ran is called that whatever else keeps it from judging.
    aside = f"; ours is {found.other}" if cell.op == "limit" and found else ""
    if is_machine_bound(cell) and cell.hardware in NO_NAME:
        return "not judgeable here", {"note": f"the paper does not name the hardware{aside}"}
    if found is None:
        needs = f"needs {cell.hardware}" if is_machine_bound(cell) else ""
        return "not run", {"note": reason or needs}
    others = sorted({r["hardware"] for r in found.runs if not same_hardware(cell.hardware, r)})
    if is_machine_bound(cell) and others:
        note = f"the paper's is {cell.hardware}, ours {others[0]}{aside}"
        return "not judgeable here", {"note": note}
    if found.other:
        return "not judgeable here", {"note": f"ours ran otherwise than the paper's: {found.other}"}
    if any(run["source"] != "hub" for run in found.runs if run["kind"] != "bench"):
        # A local file may be the corpus, but nothing shows it.
        return "not judgeable here", {"note": "ours did not train on the corpus from the hub"}
    if found.protocol and found.protocol.tokenizer:
        context.protocol(cell).check_alike(found.protocol, cell.cell_id)
    if cell.number.bound:
        return "not judgeable here", {"note": "printed as a bound, not as a number"}
    if found.figure is None:
        return "not reproduced", {}
    judgement = judge(
        context.printed(cell),
        found.figure,
        log=is_log(cell),
        timing=is_timing(cell),
        borrowed=context.borrowed(cell, found.level),
        nearest=context.nearest(cell),
    )
    return judgement.verdict, {
        "difference_nats": judgement.difference if is_log(cell) else None,
        "half_width": judgement.half_width,
        "parts": canonical_json(judgement.parts),
        "note": "; ".join(judgement.notes),
    }


def _figure_columns(
    cell: Cell, scale: str, found: Reproduced | None, plan: Paper
) -> dict[str, Any]:
    if found is None:
        return {}
    data = {text_of(run) for run in found.runs}
    columns: dict[str, Any] = {
        "n_runs": len(found.runs),
        "runs": canonical_json([run["run_id"] for run in found.runs]),
        "hardware": "; ".join(sorted({_hardware(run) for run in found.runs})),
        "data": "; ".join(sorted(data - {""})),
    }
    if found.figure is not None:
        ours, printed = found.figure.value, cell.number.value
        columns["reproduced"] = ours
        given_in = compared_in(cell, scale, found.runs, bool(found.other), plan)
        if "printed" in given_in:
            columns["difference"] = ours - printed
        if "nats" in given_in and is_log(cell) and ours > 0 and printed > 0:
            columns["difference_nats"] = math.log(ours / printed)
    return columns


def _hardware(run: dict[str, Any]) -> str:
    count = f"{run['hardware_count']} x " if run["hardware_count"] > 1 else ""
    return f"{count}{run['hardware']}"


def verdict_rows(
    cells: tuple[Cell, ...],
    runs: Runs,
    plan: Paper,
) -> Iterator[dict[str, Any]]:
    """Rows of table `verdicts`: one a measured cell at the paper's scale, and one for each other
    scale, and each other kind of cell, that has a figure."""
    context = Context(cells, plan)
    for cell in cells:
        counted = counted_row(cell, plan)
        if counted:
            yield counted
            continue
        for scale in ("smoke", "proxy", "paper"):
            row: dict[str, Any] = {"cell_id": cell.cell_id, "scale": scale, "n_runs": 0}
            judged = scale == "paper" and cell.kind == "measured"
            try:
                found = reproduce(runs, scale, cell) if cell.number else None
                notes = found.notes if found else ()
                if found is None and not judged:
                    continue
                row |= _figure_columns(cell, scale, found, plan)
                if judged:
                    verdict, columns = _paper_scale(cell, found, context, runs.reason(cell))
                    row |= columns | {"verdict": verdict}
                elif cell.kind == "measured":
                    row["verdict"] = OTHER_SCALE
                row["note"] = "; ".join(filter(None, (row.get("note", ""), *notes)))
            except UserError as error:
                row |= {"verdict": "not judgeable here" if judged else None, "note": str(error)}
            if row.get("verdict") == "not run":
                row["cost_gpu_hours"] = gpu_hours(cell, runs, plan)
            yield row
