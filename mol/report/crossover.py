"""Where one condition overtakes another: along the training steps, or along the lengths."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from mol.report.readings import HIGHER_IS_BETTER, Query, Reading, Runs, best, by_path, matches, read


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Two sides at each place that both have: below 0 where the first is better."""

    points: list[tuple[float, float]]
    runs: tuple[dict[str, Any], ...]
    other_path: bool = False  # a side ran by a dispatch path that is not the paper's


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
    """Difference of two validation curves (nat/token) at the first seed that both have."""
    found = [read(runs, scale, query)[0] for query in (one, other)]
    for seed in sorted(found[0].keys() & found[1].keys()):
        pair = tuple(side[seed].run for side in found)
        curves = [dict(runs.curves.get(run["run_id"], ())) for run in pair]
        shared = sorted(curves[0].keys() & curves[1].keys())
        if shared:
            points = [(step, curves[0][step] - curves[1][step]) for step in shared]
            return Apart(points=points, runs=pair)
    return None


def lengths_apart(runs: Runs, scale: str, one: Query, other: Query) -> Apart | None:
    """Difference of two sides of a benchmark at each length; of the paper's dispatch paths, or
    else of all there are, the fastest."""
    sides, other_path = [], False
    for query in (one, other):
        side: dict[int, list[Reading]] = defaultdict(list)
        found = [
            reading
            for reading in runs.readings.get((scale, query.condition, query.metric), [])
            if matches(reading, query.labels) and "length" in reading.labels
        ]
        found, other = by_path(found, query.labels.get("path"))
        other_path |= other
        for reading in found:
            side[int(reading.labels["length"])].append(reading)
        sides.append({length: best(readings) for length, readings in side.items()})
    shared = sorted(sides[0].keys() & sides[1].keys())
    if not shared:
        return None
    pairs = [(length, sides[0][length], sides[1][length]) for length in shared]
    sign = -1 if pairs[0][1].unit in HIGHER_IS_BETTER else 1
    used = {reading.run["run_id"]: reading.run for _, *both in pairs for reading in both}
    points = [(length, sign * (x.value - y.value)) for length, x, y in pairs]
    return Apart(points=points, runs=tuple(used.values()), other_path=other_path)
