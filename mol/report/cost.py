"""GPU-hours of a run that was not made, from a throughput that was measured."""

from mol.paper.cell import Cell
from mol.plan.experiments import Paper
from mol.report.readings import Runs


def gpu_hours(cell: Cell, runs: Runs, plan: Paper) -> float | None:
    """GPU-hours of a cell's training runs at the paper's scale, both sides and all seeds, or
    None where no GPU run of such a model measured a throughput.

    Proxy runs train the exact architecture at the paper's batch, so their tokens a second count.
    """
    sides = [slug for slug in (cell.condition, cell.versus) if slug in plan.conditions]
    seeds = max(1, len(cell.seeds))
    total = 0.0
    for slug in sides:
        rates = [
            reading.value / reading.run["hardware_count"]
            for scale in ("proxy", "paper")
            for reading in runs.readings.get((scale, slug, "train_tokens_per_s"), [])
            if reading.run["device"] == "cuda"
        ]
        if not rates:
            return None
        recipe = plan.recipes[plan.conditions[slug].recipe]
        tokens = recipe.optim.steps * recipe.optim.batch_size * recipe.seq_len
        total += seeds * tokens / max(rates) / 3600
    return total if sides else None
