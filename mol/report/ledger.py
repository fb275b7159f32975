"""The ledger of settings with what a guess does, where runs of the store measured it."""

import json
from pathlib import Path
from typing import Any

from mol.base import UserError
from mol.paper.settings import load_settings
from mol.plan.experiments import Paper, load_experiments
from mol.report.effects import effects_of
from mol.report.number import figure_text

Row = dict[str, Any]
NAMED = 2  # conditions an effect names; more are counted


def ledger_rows(folder: Path, pairs: list[Row]) -> list[Row]:
    """Rows of `settings.toml` below a paper's folder, none without it, each with `effects`:
    summaries of the `pairs` (table `effects`, JSON read), and `effect`, the same in words. What
    is not guessed has them where runs were made to tell."""
    if not (folder / "settings.toml").is_file():
        return []
    plan, settings = load_experiments(folder), load_settings(folder)
    known = {"experiments": plan.experiments, "conditions": plan.conditions | plan.benches}
    for number, row in enumerate(settings, 1):
        for name, names in known.items():
            if unknown := [value for value in getattr(row, name) if value not in names]:
                raise UserError(
                    f"{folder / 'settings.toml'}: row {number} ({row.setting}): {name}: "
                    f"{unknown[0]!r} is not defined"
                )
    return [_with_effect(row.model_dump(), pairs, plan) for row in settings]


def _with_effect(row: Row, pairs: list[Row], plan: Paper) -> Row:
    guessed = row["status"] == "guessed"
    asked = pairs if guessed else [pair for pair in pairs if _made_to_tell(pair)]
    found = effects_of(row, asked, plan) if row["key"] else []
    words = "; ".join(map(_words, found)) or ("not measured" if guessed else "")
    return row | {"effects": found, "effect": words}


def _made_to_tell(pair: Row) -> bool:
    """Whether a run of the paper's was made again with another value. Its own rows differ from one
    another in what it states, and a run has several protocols anyway."""
    run, other = pair["run_id"], pair["other_run"]
    return run != other and other.startswith(f"{pair['condition']}-s{pair['seed']}-")


def _words(effect: Row) -> str:
    """As "masked to pad_counted: -0.61 nat/token (-0.7 to -0.5), n = 3 of sparse-3of5, smoke, a
    CPU"; zero is written without a sign."""
    value = f"{round(effect['effect'], 4) + 0.0:+.4f} {effect['unit']}"
    if effect["low"] is None:
        interval = "one pair, no interval"
    else:
        interval = f"{figure_text(effect['low'], 3)} to {figure_text(effect['high'], 3)}"
    names = effect["conditions"]
    whose = ", ".join(names) if len(names) <= NAMED else f"{len(names)} conditions"
    change = f"{shown(effect['used'])} to {shown(effect['other'])}"
    parts = [f"n = {effect['n']} of {whose}", effect["scale"], effect["hardware"], *effect["notes"]]
    return f"{change}: {value} ({interval}), {', '.join(parts)}"


def shown(value: Any) -> str:
    """A value of a specification in words."""
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else json.dumps(value)
