"""Margins between the sides of a claim, each an effect with a 95 % interval: perplexities in nats,
other quantities as log ratios, accuracies and shares as differences. Scales never mix, and all
sides of a margin are read at one.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from scipy.special import stdtrit

from mol.base import UserError
from mol.paper.cell import METRICS
from mol.paper.claims import Claim, Side
from mol.paper.printed import parse
from mol.report.number import figure_text
from mol.report.paired import Paired
from mol.report.query import Query, pair_of, read
from mol.report.readings import Reading, Runs
from mol.report.verdicts import Z, mean_half_width, sample_sd

DIFFERENCES = ("fraction",)  # units that are compared by difference, not by ratio
NO_SPREAD = "one seed, and no spread of seeds is known at this scale"
EXACT = ("params_reduction", "all_reduce_per_stage", "params_total", "params_active", "coverage")


@dataclass(kw_only=True)
class Effect:
    """A margin with its interval; `runs` are behind it and `notes` say what was assumed."""

    value: float
    low: float
    high: float
    n: int
    unit: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sampling: float | None = None  # 95 % half-width from the text alone, where seeds give none


class Evaluator:
    """Evaluates claims at one scale."""

    def __init__(self, runs: Runs, scale: str, corpus_of: dict[str, str]):
        self.runs, self.scale, self.corpus_of = runs, scale, corpus_of
        self.others: list[str] = []  # how figures ran otherwise than the paper's

    def _side(self, claim: Claim, side: Side) -> dict[int, Reading] | None:
        found, other = read(self.runs, self.scale, self.query(claim, side))
        self.others.append(other)
        return found or None

    def query(self, claim: Claim, side: Side) -> Query:
        labels = {**claim.labels, **side.labels}
        return Query(name=claim.id, metric=claim.metric, condition=side.condition, labels=labels)

    def pooled(self, claim: Claim, condition: str) -> tuple[float, float, str] | None:
        """(sigma, degrees of freedom, whose) of one seed's figure at this scale, pooled over the
        conditions that ran with several seeds: those of the same corpus, or of any."""
        corpus = self.corpus_of.get(condition)
        for wanted, source in ((corpus, f"of {corpus}"), (None, "of other data")):
            squares = degrees = 0.0
            for (scale, other, metric), readings in self.runs.readings.items():
                if (scale, metric) != (self.scale, claim.metric) or (
                    wanted and self.corpus_of.get(other) != wanted
                ):
                    continue
                query = self.query(claim, Side(condition=other))
                try:
                    values = [r.value for r in read(self.runs, self.scale, query)[0].values()]
                except UserError:  # seeds of unlike training say nothing about the spread
                    continue
                sd = sample_sd(tuple(values), log=self._log(readings[0]))
                if sd is not None:
                    squares += (len(values) - 1) * sd**2
                    degrees += len(values) - 1
            if degrees:
                return math.sqrt(squares / degrees), degrees, f"{source} at this scale"
        return None

    @staticmethod
    def _log(reading: Reading) -> bool:
        return reading.unit not in DIFFERENCES

    def _compare(self, claim: Claim, one: Side, other: Side) -> Effect | None:
        """log(one / other), or their difference, over the seeds that both have."""
        sides = [self._side(claim, side) for side in (one, other)]
        if None in sides:
            return None
        x, y = sides
        shared = sorted(x.keys() & y.keys())
        if not shared:
            return None
        first = x[shared[0]]
        first.check_alike(y[shared[0]], claim.id)
        log = self._log(first)
        values = [_distance(x[seed].value, y[seed].value, log) for seed in shared]
        readings = [side[seed] for seed in shared for side in (x, y)]
        seeds, notes = self._seed_width(claim, one, tuple(values), readings)
        effect = self._effect(values, seeds, readings, notes, first, paired=True)
        pair = pair_of(self.runs, claim.metric, first, y[shared[0]])
        return effect if pair == "" else _by_items(effect, pair, seeds)

    def _alone(self, claim: Claim, side: Side) -> Effect | None:
        readings = list((self._side(claim, side) or {}).values())
        if not readings:
            return None
        values = [reading.value for reading in readings]
        return self._effect(values, 0.0, readings, [], readings[0], paired=False)

    def _seed_width(
        self, claim: Claim, side: Side, values: tuple[float, ...], readings: list[Reading]
    ) -> tuple[float, list[str]]:
        """95 % half-width from seeds: of the pairs' own differences, or of a pooled spread."""
        if readings[0].run["kind"] == "bench" or claim.metric in EXACT:
            return 0.0, []
        own = mean_half_width(values)
        if own is not None:
            return own, []
        pooled = self.pooled(claim, side.condition)
        if pooled is None:
            if METRICS[claim.metric] in DIFFERENCES:
                return 0.0, ["one seed: its spread is not known, only the items' sampling error"]
            return math.inf, [NO_SPREAD]
        sigma, degrees, source = pooled
        width = float(stdtrit(degrees, 0.975)) * math.sqrt(2) * sigma
        return width, [f"one seed, sigma {sigma:.2g} {source}"]

    def _effect(
        self,
        values: list[float],
        seeds: float,
        readings: list[Reading],
        notes: list[str],
        first: Reading,
        *,
        paired: bool,
    ) -> Effect:
        log = paired and self._log(first)
        value = math.fsum(values) / len(values)
        # Perplexities of both sides are of the same text; their sampling errors count as
        # independent, which is the wider choice.
        per_seed = readings[: 2 if paired else 1]
        errors = [r.stderr / (r.value if log else 1) for r in per_seed if r.stderr is not None]
        ranges = [
            (r.high - r.low) / 2 / (r.value if log else 1)
            for r in per_seed
            if r.low is not None and r.high is not None
        ]
        sampling = Z * math.hypot(*errors)
        if math.isinf(seeds) and errors:
            notes = [*notes, f"the text's sampling error alone is ± {figure_text(sampling, 2)}"]
        half = math.hypot(seeds, sampling, *ranges)
        machines = {reading.run["hardware"] for reading in readings}
        if first.run["kind"] == "bench" and len(machines) > 1:
            half, notes = math.inf, [*notes, "the sides ran on unlike machines"]
        runs = {reading.run["run_id"]: reading.run for reading in readings}
        unit = {"ppl/token": "nat", "nat/token": "nat"}.get(first.unit, "log ratio")
        return Effect(
            value=value, low=value - half, high=value + half, n=len(values),
            unit=unit if log else first.unit, runs=list(runs.values()), notes=notes,
            sampling=sampling if math.isinf(seeds) and errors else None,
        )  # fmt: skip

    def other_regime(self, claim: Claim, runs: list[dict[str, Any]]) -> str:
        """How the passes over the training text differ from those that the claim is about;
        empty where they do not."""
        if not claim.epochs:
            return ""
        passes = {
            reading.run["run_id"]: reading.value
            for run in runs
            for reading in self.runs.readings.get((self.scale, run["condition"], "epochs"), [])
        }
        made = [passes.get(run["run_id"]) for run in runs]
        if None in made:
            return "not evaluated: a run does not record its epochs"
        wanted = parse(claim.epochs)
        if all(wanted.low <= epochs <= wanted.high for epochs in made):
            return ""
        shown = "-".join(f"{epochs:.2g}" for epochs in sorted({min(made), max(made)}))
        return f"not evaluated: {shown} epochs, the claim is about {claim.epochs}"

    def margins(self, claim: Claim) -> list[Effect] | None:
        """Margins of a claim, oriented so that it holds when all are positive (orderings and
        monotone claims) or when its one margin lies in the target."""
        if claim.type == "threshold":
            alone = self._alone(claim, claim.sides[0])
            return alone and [alone]
        if claim.type in ("difference", "ratio"):
            found = self._compare(claim, *claim.sides)
            return found and [found]
        steps = self._gaps(claim) if claim.versus else self._neighbors(claim)
        if steps is None:
            return None
        return steps if claim.expected == "increasing" else [_flipped(step) for step in steps]

    def _neighbors(self, claim: Claim) -> list[Effect] | None:
        pairs = zip(claim.sides[1:], claim.sides[:-1], strict=True)
        found = [self._compare(claim, later, sooner) for later, sooner in pairs]
        return None if None in found else found

    def _gaps(self, claim: Claim) -> list[Effect] | None:
        """Steps between the gaps side - versus; four independent runs make up a step."""
        gaps = [
            self._compare(claim, side, other)
            for side, other in zip(claim.sides, claim.versus, strict=True)
        ]
        if None in gaps:
            return None
        steps = []
        for sooner, later in zip(gaps[:-1], gaps[1:], strict=True):
            half = math.hypot(sooner.high - sooner.value, later.high - later.value)
            value = later.value - sooner.value
            steps.append(
                Effect(
                    value=value, low=value - half, high=value + half, unit=later.unit,
                    n=min(sooner.n, later.n), runs=sooner.runs + later.runs,
                    notes=sooner.notes + later.notes,
                )
            )  # fmt: skip
        return steps


def _by_items(effect: Effect, pair: Paired | str, seeds: float) -> Effect:
    """The interval of a difference of scores from its items, of the first seed's runs; where they
    cannot be paired the two scores' own sampling errors stay, and a note says why."""
    if isinstance(pair, str):
        return replace(effect, notes=[*effect.notes, f"unpaired intervals: {pair}"])
    return replace(
        effect,
        low=effect.value - math.hypot(seeds, pair.value - pair.low),
        high=effect.value + math.hypot(seeds, pair.high - pair.value),
        notes=[*effect.notes, pair.method],
    )


def _distance(x: float, y: float, log: bool) -> float:
    if not log:
        return x - y
    if x <= 0 or y <= 0:
        raise UserError(f"no log ratio of {x:g} and {y:g}")
    return math.log(x / y)


def _flipped(effect: Effect) -> Effect:
    return replace(effect, value=-effect.value, low=-effect.high, high=-effect.low)
