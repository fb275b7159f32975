"""Evaluate the paper's claims at each scale that has runs: holds, does not hold, or undecided.

Every claim comes down to margins (`mol.report.margins`), or to where one curve crosses another.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mol.base import UserError, canonical_json
from mol.data.config import OWN_TEXT
from mol.paper.claims import Claim, Side
from mol.plan.experiments import Paper
from mol.report.cost import needs
from mol.report.crossover import first_that_stays, lengths_apart, steps_apart
from mol.report.margins import DIFFERENCES, NO_SPREAD, Effect, Evaluator
from mol.report.query import joined
from mol.report.readings import Runs, text_of
from mol.store.samples import OTHER

# What a single seed's figures say, in a note: the outcome waits for the spread of seeds.
_BY_TEXT_ALONE = {
    "holds": "by that error alone the claim would hold",
    "does not hold": "by that error alone the claim would not hold",
    "undecided": "that error leaves the claim undecided too",
}


def _crossover(claim: Claim, evaluator: Evaluator) -> tuple[str, Effect] | None:
    """Outcome and place of a crossover: a share of training in percent, or a length."""
    sides = [evaluator.query(claim, side) for side in claim.sides]
    apart = lengths_apart if claim.along == "length" else steps_apart
    found = apart(evaluator.runs, evaluator.scale, *sides)
    if found is None:
        return None
    evaluator.others.append(found.other)
    share = 100 / found.runs[0]["steps"] if claim.along == "training" else 1.0
    unit = "% of steps" if claim.along == "training" else "length"
    place = first_that_stays(found.points)
    if place is None:
        ends, note = (math.inf, math.inf), "never stays better at the places measured"
    elif place[0] == place[1]:
        ends, note = (0.0, share * place[1]), "better from the first place measured on"
    else:
        ends, note = (share * place[0], share * place[1]), "between two places measured"
    effect = Effect(
        value=ends[1], low=ends[0], high=ends[1], n=1, unit=unit, runs=list(found.runs),
        notes=[note],
    )  # fmt: skip
    if claim.along == "training" and evaluator.pooled(claim, claim.sides[0].condition) is None:
        effect.notes.append(NO_SPREAD)
        return "undecided", effect
    target = claim.target
    return _within(effect, target.low, target.high, closed=not target.bound), effect


def _within(effect: Effect, low: float, high: float, *, closed: bool = False) -> str:
    """Whether the interval lies in (low, high), or in [low, high] where the target is a range."""
    inside = low < effect.low and effect.high < high
    if inside or (closed and low <= effect.low and effect.high <= high):
        return "holds"
    if effect.high < low or effect.low > high:
        return "does not hold"
    touches = effect.high == low or effect.low == high
    return "does not hold" if touches and not closed else "undecided"


def _target(claim: Claim, effect: Effect) -> tuple[float, float]:
    """The target in the units of the effect: a bound of a ratio is a bound of its logarithm."""
    low, high = claim.target.low, claim.target.high
    if claim.type == "ratio" and effect.unit not in DIFFERENCES:
        return (math.log(low) if low > 0 else -math.inf, math.log(high))
    if claim.type == "difference" and effect.unit not in DIFFERENCES and claim.target.value != 0:
        raise UserError(f"{claim.id}: a difference in {effect.unit} can only be held against 0")
    return low, high


def outcome(claim: Claim, evaluator: Evaluator) -> tuple[str, Effect] | None:
    """(outcome, effect) at the evaluator's scale, or None where a side has no run. Of several
    margins the smallest is the effect."""
    if claim.type == "crossover":
        return _crossover(claim, evaluator)
    margins = evaluator.margins(claim)
    if not margins:
        return None
    result, effect = _judged(claim, margins)
    if effect.sampling is not None:
        alone, _ = _judged(claim, [_of_text_alone(margin) for margin in margins])
        effect.notes.append(_BY_TEXT_ALONE[alone])
    return result, effect


def _of_text_alone(margin: Effect) -> Effect:
    if margin.sampling is None:
        return margin
    low, high = margin.value - margin.sampling, margin.value + margin.sampling
    return replace(margin, low=low, high=high)


def _judged(claim: Claim, margins: list[Effect]) -> tuple[str, Effect]:
    if claim.type in ("ordering", "monotone"):
        each = [_within(margin, 0.0, math.inf) for margin in margins]
        worst = min(margins, key=lambda margin: margin.value)
        if "does not hold" in each:
            return "does not hold", worst
        return ("undecided" if "undecided" in each else "holds"), worst
    (margin,) = margins
    return _within(margin, *_target(claim, margin), closed=not claim.target.bound), margin


def claim_rows(claims: tuple[Claim, ...], runs: Runs, plan: Paper) -> Iterator[dict[str, Any]]:
    """Rows of table `claim_results`: one for each claim and scale with runs for it, and a row
    "not run" at the paper's scale where there is none, with what it would take."""
    corpus_of = {slug: plan.recipes[c.recipe].corpus for slug, c in plan.conditions.items()}
    for printed in claims:
        for scale in ("smoke", "proxy", "paper"):
            claim, stand_ins = _with_stand_ins(printed, scale, plan)
            row: dict[str, Any] = {
                **claim.model_dump(include={"experiment", "place", "text", "type", "expected"}),
                "claim_id": claim.id, "scale": scale, "cell_id": claim.cell or None, "n": 0,
            }  # fmt: skip
            evaluator = Evaluator(runs, scale, corpus_of)
            try:
                found = outcome(claim, evaluator)
                if found is None and scale != "paper" and "task" in claim.labels:
                    claim = _on_other_items(claim)
                    stand_ins.append("other items of the task than the paper's")
                    found = outcome(claim, evaluator)
            except UserError as error:
                yield row | {"outcome": "undecided", "note": str(error)}
                continue
            if found is None:
                if scale == "paper":
                    yield row | {"outcome": "not run", "needs": needs(claim, runs, plan)}
                continue
            result, effect = found
            effect.notes.extend((*stand_ins, *_own_text(effect.runs)))
            others = joined(evaluator.others)
            if scale == "paper" and others:
                # Another program than the paper's can neither bear out nor refute what it timed.
                result = "undecided"
                effect.notes.append(f"ours ran otherwise than the paper's: {others}")
            elif others and claim.labels.get("task"):
                effect.notes.append(f"not the paper's version of the task: {others}")
            if regime := evaluator.other_regime(claim, effect.runs):
                yield row | {"outcome": "undecided", "note": regime}
                continue
            yield row | {
                "outcome": result,
                "effect": _finite(effect.value),
                "low": _finite(effect.low),
                "high": _finite(effect.high),
                "unit": effect.unit,
                "n": effect.n,
                "hardware": "; ".join(sorted({run["hardware"] for run in effect.runs})),
                "runs": canonical_json(sorted({run["run_id"] for run in effect.runs})),
                "note": "; ".join(dict.fromkeys(effect.notes)),
            }


def _with_stand_ins(claim: Claim, scale: str, plan: Paper) -> tuple[Claim, list[str]]:
    """The claim about what is trained at a scale in the place of its conditions, and notes that
    say so."""
    experiment = plan.experiments[claim.experiment]
    notes = []

    def replaced(side: Side) -> Side:
        slug = experiment.stand_in(side.condition, scale)
        if slug != side.condition:
            notes.append(f"{slug} in place of {side.condition}")
        return side.model_copy(update={"condition": slug})

    changes = {name: tuple(map(replaced, getattr(claim, name))) for name in ("sides", "versus")}
    return claim.model_copy(update=changes), notes


def _on_other_items(claim: Claim) -> Claim:
    """The claim about what the models score on items that are not the paper's."""
    labels = claim.labels | {"task": f"{claim.labels['task']} {OTHER}"}
    return claim.model_copy(update={"labels": labels})


def _own_text(runs: list[dict[str, Any]]) -> list[str]:
    """That runs read a reader's own text instead of the paper's, where they did."""
    found = sorted({text_of(run).partition(":")[0] for run in runs})
    return [source for source in found if source.startswith(OWN_TEXT)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
