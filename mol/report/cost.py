"""What it would take to know: runs, tokens, and GPU-hours from a throughput that was measured."""

from mol.paper.cell import Cell
from mol.paper.claims import Claim
from mol.plan.experiments import Paper
from mol.report.readings import Runs


def _tokens(slug: str, plan: Paper) -> int:
    """Tokens of one training run at the paper's scale."""
    recipe = plan.recipes[plan.conditions[slug].recipe]
    return recipe.optim.steps * recipe.optim.batch_size * recipe.seq_len


def training_hours(seeds_of: dict[str, int], runs: Runs, plan: Paper) -> float | None:
    """GPU-hours to train these conditions with so many seeds each at the paper's scale, or None
    where no GPU run of one of them measured a throughput.

    Proxy runs train the exact architecture at the paper's batch, so their tokens a second count.
    """
    total = 0.0
    for slug, seeds in seeds_of.items():
        rates = [
            reading.value / reading.run["hardware_count"]
            for scale in ("proxy", "paper")
            for reading in runs.readings.get((scale, slug, "train_tokens_per_s"), [])
            if reading.run["device"] == "cuda"
        ]
        if not rates:
            return None
        total += seeds * _tokens(slug, plan) / max(rates) / 3600
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
    scored = " with zero-shot scores" if claim.metric in ("acc", "acc_norm") else ""
    text = f"{count} training run{'s' if count > 1 else ''}{scored}, {tokens / 1e9:.3g}B tokens"
    hours = training_hours(seeds_of, runs, plan)
    return text if hours is None else f"{text}, {hours:,.0f} GPU-hours"
