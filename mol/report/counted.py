"""Cells that are counted from a configuration, not measured: parameters, total and active."""

from typing import Any

from mol.paper.cell import Cell
from mol.plan.experiments import Paper
from mol.report.compare import apply

METRICS = ("params_total", "params_active")


def _counts(plan: Paper, condition: str, metric: str) -> dict[str, int]:
    """Rule of counting -> the count; the paper prints active counts under two rules."""
    from mol.model.counts import active_parameters, total_parameters  # imports torch

    model = plan.model(condition)
    if metric == "params_total":
        return {"counted from the configuration": total_parameters(model)}
    return {
        "active, with the DeltaNet extras": active_parameters(model, "with_delta_extras"),
        "active, without the DeltaNet extras": active_parameters(model, "without_delta_extras"),
    }


def counted_row(cell: Cell, plan: Paper) -> dict[str, Any] | None:
    """The row of table `verdicts` for a count, under the rule that prints as the paper does if
    there is one; None for a cell that is no such count."""
    if cell.metric not in METRICS or cell.condition not in plan.conditions:
        return None
    values = _counts(plan, cell.condition, cell.metric)
    if cell.op:
        others = _counts(plan, cell.versus, cell.metric)
        values = {rule: apply(cell.op, count, others[rule]) for rule, count in values.items()}
    printed = cell.number
    agreeing = [rule for rule, value in values.items() if printed.prints(value)]
    rule = agreeing[0] if agreeing else next(iter(values))
    return {
        "cell_id": cell.cell_id,
        "scale": "paper",
        "verdict": "agrees" if agreeing else "contradicted",
        "reproduced": values[rule],
        "difference": values[rule] - printed.value,
        "n_runs": 0,
        "note": rule,
    }
