"""From a printed cell to what our runs of one scale give for it."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from mol.base import UserError
from mol.paper.cell import Cell
from mol.report.readings import HIGHER_IS_BETTER, Reading, Runs, best, matches, read
from mol.report.verdicts import Figure, Sample


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What our runs of one scale give for a cell, in the cell's unit."""

    figure: Figure | None  # None: a crossover that never happens
    unit: str  # of the metric behind it
    runs: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    level: float = 0.0  # of the metric, in cell units, where two conditions are compared
    other_path: bool = False  # a timing by a dispatch path that is not the paper's


def apply(op: str, x: float, y: float) -> float:
    """x against y by the operation of a cell. Raises UserError for a ratio to 0."""
    if op == "diff":
        return x - y
    if y == 0:
        raise UserError(f"no {op} to a figure that is 0")
    return x / y if op == "ratio" else 100 * (x / y - 1)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def reproduce(runs: Runs, scale: str, cell: Cell) -> Reproduced | None:
    """What the runs of `scale` give for a cell, or None when one of its sides has no run.

    Raises UserError when the figures cannot be compared (unlike perplexities) or not told apart.
    """
    if not cell.metric:
        return None
    if cell.op == "crossover":
        return _crossover(runs, scale, cell)
    ours, other_path = read(runs, scale, cell, cell.condition, cell.labels)
    if not ours:
        return None
    if cell.op:
        condition = cell.condition if cell.versus_labels else cell.versus
        theirs, other = read(runs, scale, cell, condition, cell.versus_labels or cell.labels)
        if not theirs:
            return None
        figure, notes = _compared(cell, ours, theirs)
        readings = [*ours.values(), *theirs.values()]
        other_path |= other
    else:
        figure, notes, readings = _single(cell, ours), (), list(ours.values())
    return Reproduced(
        figure=figure,
        unit=readings[0].unit,
        runs=tuple({reading.run["run_id"]: reading.run for reading in readings}.values()),
        notes=_missing_seeds(cell, ours) + notes,
        level=cell.per_metric_unit * _mean([reading.value for reading in readings]),
        other_path=other_path,
    )


def _single(cell: Cell, ours: dict[int, Reading]) -> Figure:
    values = [cell.per_metric_unit * reading.value for reading in ours.values()]
    errors = [reading.stderr for reading in ours.values() if reading.stderr is not None]
    ranges = [_half_range(reading) for reading in ours.values()]
    return Figure(
        value=_mean(values),
        samples=(Sample(values=tuple(values)),),
        # Seeds share one evaluation set, so its sampling error does not average out.
        stderr=cell.per_metric_unit * _mean(errors) if errors else None,
        half_range=cell.per_metric_unit * max(ranges),
    )


def _compared(
    cell: Cell, ours: dict[int, Reading], theirs: dict[int, Reading]
) -> tuple[Figure, tuple[str, ...]]:
    one, other = next(iter(ours.values())), next(iter(theirs.values()))
    one.alike().check_alike(other.alike(), cell.cell_id)
    x, y = (
        {seed: cell.per_metric_unit * reading.value for seed, reading in side.items()}
        for side in (ours, theirs)
    )
    mean_x, mean_y = _mean(list(x.values())), _mean(list(y.values()))
    paired = x.keys() == y.keys()
    if paired:
        pairs = tuple(apply(cell.op, x[seed], y[seed]) for seed in x)
        samples: tuple[Sample, ...] = (Sample(values=pairs, borrow=math.sqrt(2)),)
    else:
        samples = (
            Sample(values=tuple(apply(cell.op, value, mean_y) for value in x.values())),
            Sample(values=tuple(apply(cell.op, mean_x, value) for value in y.values())),
        )
    value = apply(cell.op, mean_x, mean_y)
    # Relative half-ranges of the two timings, in quadrature.
    relative = math.hypot(_relative_range(one), _relative_range(other))
    figure = Figure(value=value, samples=samples, half_range=relative * abs(value))
    return figure, () if paired else ("the two sides have different seeds, so no pairs",)


def is_log(cell: Cell) -> bool:
    """Whether a cell is judged by a log ratio: all positive quantities, but no differences."""
    return cell.op not in ("diff", "percent")


def _missing_seeds(cell: Cell, ours: dict[int, Reading]) -> tuple[str, ...]:
    missing = sorted(set(cell.seeds) - set(ours))
    bench = any(reading.run["kind"] == "bench" for reading in ours.values())
    return (f"no run with seed {', '.join(map(str, missing))}",) if missing and not bench else ()


def _half_range(reading: Reading) -> float:
    """Half the range of repeated timings; 0 where they are not repeated."""
    if reading.low is None or reading.high is None:
        return 0.0
    return (reading.high - reading.low) / 2


def _relative_range(reading: Reading) -> float:
    half = _half_range(reading)
    return half / abs(reading.value) if half else 0.0


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


def _crossover(runs: Runs, scale: str, cell: Cell) -> Reproduced | None:
    """The step, or the length, from which the cell's condition stays better than the other.

    The true place lies between the last point before and the first after: the middle is the
    figure and half the gap a bound on its error.
    """
    sides = _bench_sides(runs, scale, cell) if cell.versus_labels else _curves(runs, scale, cell)
    if sides is None:
        return None
    points, used, unit, scale_to = sides
    place = first_that_stays(points)
    if place is None:
        return Reproduced(
            figure=None, unit=unit, runs=used, notes=("never stays better at this scale",)
        )  # fmt: skip
    before, after = (scale_to * end for end in place)
    figure = Figure(
        value=(before + after) / 2, samples=(Sample(values=(), borrow=1.0),),
        bound=(after - before) / 2,
    )  # fmt: skip
    return Reproduced(figure=figure, unit=unit, runs=used)


def _curves(runs: Runs, scale: str, cell: Cell):
    curves = []
    for condition in (cell.condition, cell.versus):
        readings, _ = read(runs, scale, cell, condition, cell.labels)
        run = next((r.run for r in readings.values() if r.run["run_id"] in runs.curves), None)
        if run is None:
            return None
        curves.append((run, dict(runs.curves[run["run_id"]])))
    (run, mine), (other, theirs) = curves
    points = [(step, mine[step] - theirs[step]) for step in sorted(mine.keys() & theirs.keys())]
    share = 100 / run["steps"] if cell.unit == "%" else 1.0
    return points, (run, other), "nat/token", share


def _bench_sides(runs: Runs, scale: str, cell: Cell):
    found = runs.readings.get((scale, cell.condition, cell.metric), [])
    by_length = []
    for labels in (cell.labels, cell.versus_labels):
        side: dict[int, list[Reading]] = defaultdict(list)
        for reading in found:
            if matches(reading, labels) and "length" in reading.labels:
                side[int(reading.labels["length"])].append(reading)
        by_length.append({length: best(readings) for length, readings in side.items()})
    mine, theirs = by_length
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return None
    unit = mine[shared[0]].unit
    sign = -1 if unit in HIGHER_IS_BETTER else 1
    points = [(length, sign * (mine[length].value - theirs[length].value)) for length in shared]
    used = {r.run["run_id"]: r.run for length in shared for r in (mine[length], theirs[length])}
    return points, tuple(used.values()), unit, 1.0
