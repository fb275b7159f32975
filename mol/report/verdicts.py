"""When does a measured figure reproduce a printed one? The rule, free of files and databases.

Let d be ours minus the paper's, in nats for perplexities (log ratio for every positive
quantity) or in printed units for differences and percentages, and h its 95 % half-width:

    not reproduced   0 lies outside d +- h
    reproduced       0 lies inside, and h is at most half the distance to the nearest other row
    under-powered    0 lies inside, but d +- h cannot tell this row from its neighbor

h is derived: the rounding of the printed digits, and the grid on which a crossover is found, are
bounds and add linearly; seed spread (t interval, Welch's degrees of freedom), evaluation sampling
error and timing spread are random and add in quadrature.
"""

import math
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

from mol.base import UserError

Verdict = Literal[
    "reproduced", "not reproduced", "under-powered", "not run", "not judgeable here",
    "not run at paper scale",
]  # fmt: skip
Z = 1.959964  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A printed number: its value, half a unit of its last digit, and its spread.

    `spread` is the standard deviation over `n_seeds` runs, or the stderr of an evaluation
    when `n_seeds` is 1. `timing` is the run-to-run spread that the paper states, relative.
    """

    value: float
    half_unit: float
    spread: float | None = None
    n_seeds: int = 1
    borrow: float = 1.0  # as Sample.borrow
    timing: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Independent values, one a seed, whose mean enters a figure, in printed units. `borrow`
    times sigma is the spread of one of them where it has to be borrowed."""

    values: tuple[float, ...]
    borrow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What our runs give for a cell, in printed units.

    `stderr` is the evaluation's sampling error, `half_range` half the range of repeated timings,
    `bound` how far the grid it was read from lets the figure be off."""

    value: float
    samples: tuple[Sample, ...]
    stderr: float | None = None
    half_range: float | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """The seed spread assumed where only one seed ran, in the units of d. `sigma` None: nothing
    to borrow. Not `supported`: borrowed from other data, so at best under-powered."""

    sigma: float | None
    source: str
    supported: bool


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its numbers; `parts` are 95 % half-widths in the units of d."""

    verdict: Verdict
    difference: float
    half_width: float
    parts: dict[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What must be alike before two perplexities are compared; None: not stated."""

    unit: str
    split: str | None
    tokenizer: str | None  # its kind: bpe or gpt2
    pad: str | None

    def check_alike(self, other: "Protocol", what: str) -> None:
        """Raises UserError naming the first thing that both state and that differs."""
        for key in ("unit", "split", "tokenizer", "pad"):
            mine, theirs = getattr(self, key), getattr(other, key)
            if mine is not None and theirs is not None and mine != theirs:
                raise UserError(
                    f"{what}: {key} {mine!r} and {theirs!r} are unlike perplexities; "
                    "compare figures of one protocol"
                )


def to_difference(ours: float, reported: float, log: bool) -> float:
    """d between two values. Raises UserError where a logarithm needs positive numbers."""
    if not log:
        return ours - reported
    if ours <= 0 or reported <= 0:
        raise UserError(f"no log ratio of {ours:g} and {reported:g}; both must be positive")
    return math.log(ours / reported)


def mean_half_width(values: tuple[float, ...]) -> float | None:
    """Half of the 95 % t interval of the mean, None for fewer than two values."""
    n, sd = len(values), sample_sd(values)
    return None if sd is None else float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)


def sample_sd(values: tuple[float, ...], log: bool = False) -> float | None:
    """Standard deviation with ddof = 1 (of the logarithms if `log`), None for fewer than two."""
    if len(values) < 2:
        return None
    if log:
        values = tuple(to_difference(value, 1.0, log=True) for value in values)
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _seed_part(
    printed: Printed, figure: Figure, borrowed: Borrowed, log: bool
) -> tuple[float, list[str], bool]:
    """Half-width from seeds, notes on what was borrowed, and whether all of it is supported."""
    unit = printed.value if log else 1.0
    theirs = printed.spread / unit if printed.spread and printed.n_seeds > 1 else None
    samples = [("the paper's", theirs, printed.n_seeds, printed.borrow)]
    for sample in figure.samples:
        sd = sample_sd(sample.values, log)
        samples.append(("ours", sd, max(1, len(sample.values)), sample.borrow))
    variances: list[tuple[float, float]] = []  # variance of a mean, its degrees of freedom
    notes, supported = [], True
    for name, sd, n, borrow in samples:
        if sd is not None:
            variances.append((sd**2 / n, n - 1))
            continue
        supported &= borrowed.supported
        seeds = "one seed" if n == 1 else f"{n} seeds without a printed spread"
        notes.append(f"{name}: {seeds}, {borrowed.source}")
        # A borrowed sigma counts as known: it is the largest of several, or the model's own.
        variances.append(((borrow * (borrowed.sigma or 0.0)) ** 2 / n, math.inf))
    total = math.fsum(variance for variance, _ in variances)
    if total == 0:
        return 0.0, notes, supported
    welch = math.fsum(variance**2 / df for variance, df in variances)
    quantile = float(stdtrit(total**2 / welch, 0.975)) if welch > 0 else Z
    return quantile * math.sqrt(total), notes, supported


def judge(
    printed: Printed,
    figure: Figure,
    *,
    log: bool,
    timing: bool,
    borrowed: Borrowed | None,
    nearest: float | None,
) -> Judgement:
    """Apply the rule. `nearest` is the distance from the printed value to the nearest other row
    in the units of d, None without such a row; `borrowed` None means that seeds play no part
    (timings and counts)."""
    d = to_difference(figure.value, printed.value, log)
    unit = printed.value if log else 1.0
    own_unit = figure.value if log else 1.0
    notes: list[str] = []
    supported = True
    parts = {"rounding": printed.half_unit / unit}
    if borrowed is not None:
        parts["seeds"], notes, supported = _seed_part(printed, figure, borrowed, log)
    if figure.bound is not None:
        parts["grid"] = figure.bound / own_unit
    errors = [figure.stderr / own_unit] if figure.stderr is not None else []
    if printed.n_seeds == 1 and printed.spread is not None:
        errors.append(printed.spread / unit)
    if errors:
        parts["evaluation"] = Z * math.hypot(*errors)
    if timing:
        scale = 1.0 if log else printed.value
        stated = (printed.timing or 0.0) * scale
        parts["timing"] = math.hypot(stated, (figure.half_range or 0.0) / own_unit)
        if printed.timing is None:
            notes.append("the paper states no spread of this timing")
    bounds = parts["rounding"] + parts.get("grid", 0.0)
    h = bounds + math.hypot(*(v for k, v in parts.items() if k not in ("rounding", "grid")))
    if abs(d) > h:
        verdict: Verdict = "not reproduced"
    elif not supported:
        verdict = "under-powered"
        notes.append("a borrowed sigma has no support here, so under-powered at best")
    elif nearest is None:
        verdict = "under-powered"
        notes.append("no other row to tell it from")
    else:
        verdict = "reproduced" if h <= nearest / 2 else "under-powered"
    return Judgement(verdict=verdict, difference=d, half_width=h, parts=parts, notes=tuple(notes))
