"""Load the ledger of settings (`settings.toml`): what a run uses, and how we came to know it."""

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field

from mol.base import Frozen, UserError, one_line, read_toml

Value = bool | int | float | str | tuple[int | float | str, ...]


class Setting(Frozen):
    """One setting of the paper's runs.

    stated: the paper says it; found: a public file of its authors says it; derived: the paper's
    numbers leave no other choice; guessed: the best prior. `key` is the place in a run's
    specification (or `protocol.<part>`, a part of how a perplexity is computed), absent for what
    the code fixes. Without `conditions` it holds for every run of the experiments.
    """

    experiments: tuple[str, ...] = Field(min_length=1)
    conditions: tuple[str, ...] = ()  # conditions or benchmarks
    setting: str = Field(min_length=1)
    key: str | None = None
    value: Value
    status: Literal["stated", "found", "derived", "guessed"]
    source: str = Field(min_length=1)


def load_settings(folder: Path) -> tuple[Setting, ...]:
    """Rows of a folder's `settings.toml`. Raises UserError naming the row and key at fault."""
    path = Path(folder) / "settings.toml"
    document = read_toml(path)
    if unknown := set(document) - {"settings"}:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}; every entry is [[settings]]")
    rows = []
    for number, entry in enumerate(document.get("settings", []), 1):
        try:
            rows.append(Setting.model_validate(entry))
        except pydantic.ValidationError as error:
            raise one_line(error, f"{path}: row {number} ({entry.get('setting')})") from None
    return tuple(rows)
