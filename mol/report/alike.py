"""Whether our figure and the printed one are alike enough for a difference between them.

A figure that is not stands beside the printed number, labeled, and nothing is subtracted: a
perplexity on another text or over another vocabulary, a time on another machine, a model of
another width.
"""

from typing import Any

from mol.paper.cell import METRICS, Cell
from mol.plan.experiments import Paper
from mol.report.query import same_hardware

TIMED_UNITS = {"token/s", "step/s", "ms", "ms/token", "s"}
NO_NAME = ("", "GPU", "CPU")  # hardware that the paper does not name
# Grow with the length of training, which a proxy cuts.
WHOLE_TRAINING = {"step", "h", "GPU-hour"}


def is_timing(cell: Cell) -> bool:
    return METRICS.get(cell.metric) in TIMED_UNITS or cell.metric == "dispatch_speedup"


def is_machine_bound(cell: Cell) -> bool:
    """Whether a cell holds only for the machine it was measured on; rounding noise and what its
    memory holds do too."""
    return is_timing(cell) or METRICS.get(cell.metric) == "logit" or cell.op == "limit"


def is_perplexity(cell: Cell) -> bool:
    return METRICS.get(cell.metric) == "ppl/token" and cell.op != "crossover"


def compared_in(
    cell: Cell, scale: str, runs: tuple[dict[str, Any], ...], other_way: bool, plan: Paper
) -> frozenset[str]:
    """What a difference may be given in: "printed" units, "nats", both or nothing.

    At proxy scale perplexities compare by their ratio alone (nats), on the corpus from the hub and
    under the same vocabulary: a local file may hold the corpus, but nothing shows it.
    """
    nothing, both = frozenset(), frozenset(("printed", "nats"))
    if scale == "smoke":
        return nothing
    if is_machine_bound(cell):
        named = cell.hardware not in NO_NAME and all(same_hardware(cell.hardware, r) for r in runs)
        if not named:
            return nothing
    if other_way:
        return nothing
    if is_perplexity(cell):
        alike = all(run["source"] == "hub" and _same_vocabulary(run, plan) for run in runs)
        if not alike or (scale != "paper" and cell.op == "diff"):
            return nothing
        return frozenset(("nats",)) if scale != "paper" and not cell.op else both
    return nothing if scale != "paper" and cell.unit in WHOLE_TRAINING else both


def _same_vocabulary(run: dict[str, Any], plan: Paper) -> bool:
    """Whether a run's tokenizer has the kind and the size that the paper's has."""
    recipe = plan.recipes[plan.conditions[run["condition"]].recipe]
    return (run["tokenizer"], run["vocab_size"]) == (recipe.tokenizer, recipe.vocab_size)
