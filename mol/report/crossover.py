"""Where one condition overtakes another: along the training steps, or along the lengths."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from mol.report.query import (
    HIGHER_IS_BETTER,
    Query,
    as_printed,
    best,
    joined,
    machine_of,
    matching,
    preferred,
    read,
)
from mol.report.readings import Reading, Runs


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Two sides at each place that both have: below 0 where the first is better."""

    points: list[tuple[float, float]]
    runs: tuple[dict[str, Any], ...]
    other: str = ""  # how a side ran otherwise than the paper's


def first_that_stays(points: list[tuple[float, float]]) -> tuple[float, float] | None:
    """(last place before, first place) from which the second value stays below 0, or None.

    With no place before, both are the first.
    """
    crossed = None
    for place, value in points:
        if value >= 0:
            crossed = None
        elif crossed is None:
            crossed = place
    if crossed is None:
        return None
    before = [place for place, _ in points if place < crossed]
    return (before[-1] if before else crossed), crossed


def steps_apart(runs: Runs, scale: str, one: Query, other: Query) -> Apart | None:
    """Difference of two validation curves (nat/token) at the first seed that both have. Raises
    UserError for curves of unlike text."""
    found = [read(runs, scale, query)[0] for query in (one, other)]
    for seed in sorted(found[0].keys() & found[1].keys()):
        found[0][seed].check_alike(found[1][seed], one.name)
        pair = tuple(side[seed].run for side in found)
        curves = [dict(runs.curves.get(run["run_id"], ())) for run in pair]
        shared = sorted(curves[0].keys() & curves[1].keys())
        if shared:
            points = [(step, curves[0][step] - curves[1][step]) for step in shared]
            return Apart(points=points, runs=pair)
    return None


def lengths_apart(runs: Runs, scale: str, one: Query, other: Query) -> Apart | None:
    """Difference of two sides of a benchmark at each length, on one machine: the one that is
    named, else the latest. Of those that ran as the paper's, or else of all, the fastest."""
    sides, others = [], []
    for query in (one, other):
        found = [r for r in matching(runs, scale, query) if "length" in r.labels]
        found, way = as_printed(runs, query, found)
        sides.append(found)
        others.append(way)
    machine = _machine(one.hardware, *sides)
    best_at = []
    for side in sides:
        at: dict[int, list[Reading]] = defaultdict(list)
        for reading in side:
            if machine_of(reading.run) == machine:
                at[int(reading.labels["length"])].append(reading)
        best_at.append({length: best(readings) for length, readings in at.items()})
    shared = sorted(best_at[0].keys() & best_at[1].keys())
    if not shared:
        return None
    pairs = [(length, best_at[0][length], best_at[1][length]) for length in shared]
    sign = -1 if pairs[0][1].unit in HIGHER_IS_BETTER else 1
    used = {reading.run["run_id"]: reading.run for _, *both in pairs for reading in both}
    points = [(length, sign * (x.value - y.value)) for length, x, y in pairs]
    return Apart(points=points, runs=tuple(used.values()), other=joined(others))


def _machine(named: str, one: list[Reading], other: list[Reading]) -> tuple[str, int] | None:
    """The machine that both sides ran on; of several the named, then the one that ran last."""
    sides = [[reading.run for reading in side] for side in (one, other)]
    both = set.intersection(*({machine_of(run) for run in side} for side in sides))
    found = [run for side in sides for run in side if machine_of(run) in both]
    if not found:
        return None
    return machine_of(preferred(named, found))
