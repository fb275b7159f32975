"""From a printed cell to what our runs of one scale give for it."""

import math
from dataclasses import dataclass
from typing import Any

from mol.base import UserError
from mol.paper.cell import Cell, Label
from mol.report.crossover import first_that_stays, lengths_apart, steps_apart
from mol.report.limit import memory_limit
from mol.report.paired import Paired
from mol.report.query import Query, beside, joined, pair_of, read
from mol.report.readings import Reading, Runs
from mol.report.verdicts import Figure, Protocol, Sample, Z


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What our runs of one scale give for a cell, in the cell's unit."""

    figure: Figure | None  # None: a crossover that never happens
    protocol: Protocol | None  # of a perplexity
    runs: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    level: float = 0.0  # of the metric, in cell units, where two conditions are compared
    other: str = ""  # how a timing ran otherwise than the paper's


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
    query = _query(cell, cell.condition, cell.labels)
    if cell.op == "limit":
        return _limit(runs, scale, query)
    ours, other = read(runs, scale, query)
    if not ours:
        return None
    if cell.op:
        condition = cell.condition if cell.versus_labels else cell.versus
        other_side = _query(cell, condition, cell.versus_labels or cell.labels)
        theirs, theirs_other = read(runs, scale, other_side)
        if not theirs:
            return None
        figure, notes = _compared(runs, cell, ours, theirs)
        readings = [*ours.values(), *theirs.values()]
        other = joined((other, theirs_other))
    else:
        readings = list(ours.values())
        figure, notes = _single(cell, ours), _with_pad(runs, scale, cell, readings)
        aside = "" if other else beside(runs, scale, query, readings[0].run)
        notes += (f"beside it {aside}",) if aside else ()
    return Reproduced(
        figure=figure,
        protocol=readings[0].alike(),
        runs=tuple({reading.run["run_id"]: reading.run for reading in readings}.values()),
        notes=_missing_seeds(cell, ours) + notes,
        level=cell.per_metric_unit * _mean([reading.value for reading in readings]),
        other=other,
    )


def _query(cell: Cell, condition: str, labels: dict[str, Label]) -> Query:
    return Query(
        name=cell.cell_id, metric=cell.metric, condition=condition, labels=labels,
        seeds=cell.seeds, hardware=cell.hardware,
    )  # fmt: skip


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


def _with_pad(runs: Runs, scale: str, cell: Cell, readings: list[Reading]) -> tuple[str, ...]:
    """The same figure by the other PAD rule, where the paper does not say which is its own."""
    counted = [
        other.value
        for reading in readings
        for other in runs.readings[scale, cell.condition, cell.metric]
        if other.run is reading.run
        and other.labels == reading.labels
        and other.protocol == reading.protocol | {"pad": "pad_counted"}
        and reading.protocol["pad"] == "masked"
    ]
    if "pad" in cell.labels or not counted:
        return ()
    return (f"PAD masked; with PAD counted {cell.per_metric_unit * _mean(counted):.4g}",)


def _compared(
    runs: Runs, cell: Cell, ours: dict[int, Reading], theirs: dict[int, Reading]
) -> tuple[Figure, tuple[str, ...]]:
    one, other = next(iter(ours.values())), next(iter(theirs.values()))
    one.check_alike(other, cell.cell_id)
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
    stderr, how = _score_error(runs, cell, one, other)
    figure = Figure(value=value, samples=samples, stderr=stderr, half_range=relative * abs(value))
    return figure, how if paired else ("the two sides have different seeds, so no pairs", *how)


def _score_error(
    runs: Runs, cell: Cell, one: Reading, other: Reading
) -> tuple[float | None, tuple[str, ...]]:
    """Sampling error of a difference of two zero-shot scores, in cell units, and how it was got:
    from the items where both scored the same, else from the errors of the two."""
    pair = pair_of(runs, cell.metric, one, other) if cell.op == "diff" else ""
    if isinstance(pair, Paired):
        half = max(pair.value - pair.low, pair.high - pair.value)
        return cell.per_metric_unit * half / Z, (pair.method,)
    errors = [reading.stderr for reading in (one, other) if reading.stderr is not None]
    if not pair or not errors:
        return None, ()
    return cell.per_metric_unit * math.hypot(*errors), (f"unpaired intervals: {pair}",)


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


def _limit(runs: Runs, scale: str, query: Query) -> Reproduced | None:
    found = memory_limit(runs, scale, query)
    if found is None:
        return None
    figure = Figure(value=found.length, samples=(Sample(values=()),))
    return Reproduced(figure=figure, protocol=None, runs=(found.run,), other=found.how)


def _crossover(runs: Runs, scale: str, cell: Cell) -> Reproduced | None:
    """The step, or the length, from which the cell's condition stays better than the other.

    The true place lies between the last point before and the first after: the middle is the
    figure and half the gap a bound on its error.
    """
    if cell.versus_labels:
        sides = [
            _query(cell, cell.condition, labels) for labels in (cell.labels, cell.versus_labels)
        ]
        found = lengths_apart(runs, scale, *sides)
    else:
        sides = [
            _query(cell, condition, cell.labels) for condition in (cell.condition, cell.versus)
        ]
        found = steps_apart(runs, scale, *sides)
    if found is None:
        return None
    place = first_that_stays(found.points)
    if place is None:
        notes = ("never stays better at this scale",)
        return Reproduced(
            figure=None, protocol=None, runs=found.runs, notes=notes, other=found.other
        )
    to_cell = 100 / found.runs[0]["steps"] if cell.unit == "%" else 1.0
    before, after = (to_cell * end for end in place)
    notes = ("better from the first place measured on",) if before == after else ()
    figure = Figure(
        value=(before + after) / 2, samples=(Sample(values=()),), bound=(after - before) / 2
    )
    return Reproduced(figure=figure, protocol=None, runs=found.runs, notes=notes, other=found.other)
