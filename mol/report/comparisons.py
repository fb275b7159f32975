"""Scored models of one scale against each other, task by task: effect, interval, p and items."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from mol.base import UserError
from mol.plan.experiments import Paper
from mol.report.paired import SCORES, Paired
from mol.report.query import Query, pair_of, read
from mol.report.readings import Reading, Runs
from mol.report.verdicts import Z


def comparison_rows(runs: Runs, plan: Paper) -> Iterator[dict[str, Any]]:
    """Rows of table `comparisons`: each two conditions of an experiment with zero-shot tasks, at
    each seed that both have. Scores of unlike tests are not compared, and the row says so."""
    for experiment in plan.experiments.values():
        for scale in runs.scales if experiment.zero_shot else ():
            conditions = experiment.at(scale)
            for task, metric in _scored(runs, scale, conditions):
                sides = {}
                for slug in conditions:
                    query = Query(
                        name=f"{slug}, {task}", metric=metric, condition=slug, labels={"task": task}
                    )
                    try:
                        sides[slug] = read(runs, scale, query)[0]
                    except UserError:  # seeds of unlike tests: the cells' and claims' notes say so
                        continue
                for other, one in combinations(sides, 2):  # as a rule MoL less a dense model
                    for seed in sorted(sides[one].keys() & sides[other].keys()):
                        pair = sides[one][seed], sides[other][seed]
                        yield {"scale": scale, "task": task, "metric": metric} | _row(
                            runs, metric, *pair
                        )


def _scored(runs: Runs, scale: str, conditions: tuple[str, ...]) -> list[tuple[str, str]]:
    """(task, metric) that any of these conditions has."""
    found = {
        (str(reading.labels["task"]), metric)
        for slug in conditions
        for metric in SCORES
        for reading in runs.readings.get((scale, slug, metric), [])
        if "task" in reading.labels
    }
    return sorted(found)


def _row(runs: Runs, metric: str, one: Reading, other: Reading) -> dict[str, Any]:
    row = {
        "condition": one.run["condition"],
        "other": other.run["condition"],
        "seed": one.run["seed"],
        "run_id": one.run["run_id"],
        "other_run": other.run["run_id"],
    }
    try:
        one.check_alike(other, "the two")
    except UserError as error:
        return row | {"note": str(error)}
    found = pair_of(runs, metric, one, other)
    if isinstance(found, Paired):
        numbers = {name: getattr(found, name) for name in ("value", "stderr", "low", "high", "p")}
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        return row | finite | {"n": found.n, "note": found.method}
    value = one.value - other.value
    note = f"unpaired: {found}"
    if None in (one.stderr, other.stderr):
        return row | {"value": value, "note": f"{note}, and no standard error is recorded"}
    stderr = math.hypot(one.stderr, other.stderr)
    return row | {
        "value": value,
        "stderr": stderr,
        "low": value - Z * stderr,
        "high": value + Z * stderr,
        "note": note,
    }
