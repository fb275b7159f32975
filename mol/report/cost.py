"""What it would take to know: runs, tokens, and GPU-hours from a throughput that was measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mol.base import canonical_json
from mol.paper.cell import Cell
from mol.paper.claims import Claim
from mol.plan.build import plan as planned_runs
from mol.plan.experiments import Paper
from mol.report.number import figure_text
from mol.report.paired import SCORES
from mol.report.readings import Runs


def _tokens(slug: str, plan: Paper) -> int:
    """Tokens of one training run at the paper's scale."""
    recipe = plan.recipes[plan.conditions[slug].recipe]
    return recipe.optim.steps * recipe.optim.batch_size * recipe.seq_len


def training_hours(seeds_of: dict[str, int], runs: Runs, plan: Paper) -> float | None:
    """GPU-hours to train these conditions with so many seeds each at the paper's scale, or None
    where no GPU measured the speed of one of them."""
    total = 0.0
    for slug, seeds in seeds_of.items():
        recipe = plan.recipes[plan.conditions[slug].recipe]
        speed = runs.speeds.get((plan.model(slug), recipe.seq_len))
        if speed is None:
            return None
        total += speed.hours(seeds * _tokens(slug, plan))
    return total if seeds_of else None


def gpu_hours(cell: Cell, runs: Runs, plan: Paper) -> float | None:
    """GPU-hours of a cell's training runs, both sides and all seeds; None where unknown."""
    sides = [slug for slug in (cell.condition, cell.versus) if slug in plan.conditions]
    return training_hours(dict.fromkeys(sides, max(1, len(cell.seeds))), runs, plan)


def needs(claim: Claim, runs: Runs, plan: Paper) -> str:
    """What decides a claim at the paper's scale, in words: its runs and tokens, and the GPU-hours
    where a throughput was measured."""
    names = dict.fromkeys(side.condition for side in (*claim.sides, *claim.versus))
    benches = [name for name in names if name not in plan.conditions]
    if benches:
        return f"benchmark {', '.join(benches)}"
    repeated = {slug for e in plan.experiments.values() for slug in e.three_seeds}
    several = claim.seeds == "paired"
    seeds_of = {s: len(plan.seeds) if several and s in repeated else 1 for s in names}
    count = sum(seeds_of.values())
    tokens = sum(seeds * _tokens(slug, plan) for slug, seeds in seeds_of.items())
    scored = " with zero-shot scores" if claim.metric in SCORES else ""
    text = f"{count} training run{'s' if count > 1 else ''}{scored}, {tokens / 1e9:.3g}B tokens"
    hours = training_hours(seeds_of, runs, plan)
    return text if hours is None else f"{text}, {figure_text(hours, 2)} GPU-hours"


def not_run_rows(runs: Runs, folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of table `not_run`: training and zero-shot runs of the plan that are not complete, at
    each scale but smoke that has been begun. Wherever their text comes from, runs count as made."""
    made = {(r["scale"], r["kind"], r["condition"], r["seed"]) for r in runs.runs.values()}
    for scale in ("proxy", "paper"):
        if scale not in runs.scales:
            continue
        for planned in planned_runs(scale, folder=folder):
            spec = planned.spec
            if spec.kind == "bench" or (scale, spec.kind, spec.condition, spec.seed) in made:
                continue
            row = {"scale": scale, "kind": spec.kind, "condition": spec.condition}
            row |= {"seed": spec.seed, "experiments": canonical_json(planned.experiments)}
            speed = runs.speeds.get((spec.model, spec.seq_len)) if spec.kind == "train" else None
            if speed:
                row |= {
                    "gpu_hours": speed.hours(spec.tokens),
                    "gpu": speed.gpu,
                    "measured_by": speed.run_id,
                }
            yield row
