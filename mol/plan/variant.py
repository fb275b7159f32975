"""In what a training run differs from the plan: a reader's variant, which judges no number."""

from typing import Any

from mol.plan.experiments import Paper
from mol.plan.scale import train_spec

# What a run is called, not what it does.
IDENTITY = ("kind", "scale", "condition", "seed")
# Where the text comes from is judged by itself; the others leave the result as it is.
FREE = ("data.source", "evaluation.every", "evaluation.curve_sequences", "optim.accumulate",
        "optim.checkpoint_activations")  # fmt: skip
# A smaller scale is cut to the machine: how much it trains is part of the scale, and recorded.
CUT = ("optim.steps", "optim.warmup_steps", "optim.batch_size", "data.max_train_tokens",
       "data.max_eval_tokens", "evaluation.final_sequences", "precision")  # fmt: skip


def leaves(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Place ("a.b") -> value of a nested mapping; lists are leaves, None is left out."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        place = f"{path}.{key}" if path else key
        if isinstance(inner, dict):
            found |= leaves(inner, place)
        elif inner is not None:
            found[place] = inner
    return found


def settings_of(spec: dict[str, Any]) -> dict[str, Any]:
    """All that decides a training run but its name, scale and seed, by place."""
    return {key: value for key, value in leaves(spec).items() if key not in IDENTITY}


def planned(paper: Paper, condition: str, scale: str) -> dict[str, Any] | None:
    """The settings that the plan gives a condition, or None for one that the paper has not."""
    if condition not in paper.conditions:
        return None
    recipe = paper.recipes[paper.conditions[condition].recipe]
    spec = train_spec(condition, paper.model(condition), recipe, paper.seeds[0], scale, {})
    return settings_of(spec.model_dump(mode="json"))


def departures(spec: dict[str, Any], plan: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """Place -> (planned, own value) where a training run is not as `planned` has it; `spec` is its
    specification as JSON."""
    if plan is None:
        return {}
    own = settings_of(spec)
    free = FREE if spec["scale"] == "paper" else FREE + CUT
    return {
        key: (plan.get(key), own.get(key))
        for key in sorted(plan.keys() | own.keys())
        if plan.get(key) != own.get(key) and not key.startswith(free)
    }
