"""Read a paper's `conditions.toml` and `experiments.toml` into checked, frozen models."""

import functools
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from mol.base import Frozen, UserError, one_line, read_toml
from mol.data.config import Corpus, PackedLayout, PaddedLayout
from mol.model.config import ModelConfig
from mol.plan.spec import OptimSpec

PAPER = Path(__file__).parent.parent / "paper"


class Recipe(Frozen):
    """Corpus, tokens and schedule that several conditions share."""

    corpus: Corpus
    tokenizer: Literal["bpe", "gpt2"]
    vocab_size: int
    layout: PaddedLayout | PackedLayout = Field(discriminator="kind")
    seq_len: int
    optim: OptimSpec


class Condition(Frozen):
    """One model as the paper trains it; `model` lacks only the vocabulary of its recipe."""

    label: str
    recipe: str
    model: dict[str, Any]


class Experiment(Frozen):
    title: str
    paper: str  # tables and sections
    note: str | None = None
    conditions: tuple[str, ...] = ()
    three_seeds: tuple[str, ...] = ()
    benches: tuple[str, ...] = ()
    zero_shot: tuple[str, ...] = ()


class BenchEntry(pydantic.BaseModel):
    """A benchmark: its program, the conditions it times and its arguments at each scale."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    program: str
    models: tuple[str, ...] = ()
    at_paper_size: bool = False
    # Labels of the figures that may judge the paper's: how its own program ran.
    protocol: dict[str, tuple[str, ...]] = {}
    beside: tuple[str, ...] = ()  # benchmarks whose figures stand beside these, and do not judge
    smoke: dict[str, Any]
    paper: dict[str, Any]


class Paper(Frozen):
    """The runs of a paper, before a scale is chosen."""

    seeds: tuple[int, ...]
    recipes: dict[str, Recipe]
    conditions: dict[str, Condition]
    experiments: dict[str, Experiment]
    benches: dict[str, BenchEntry]

    @pydantic.model_validator(mode="after")
    def _check(self):
        for name, condition in self.conditions.items():
            if condition.recipe not in self.recipes:
                raise ValueError(f"condition {name} names the unknown recipe {condition.recipe!r}")
        for name, experiment in self.experiments.items():
            for slug in (*experiment.conditions, *experiment.three_seeds):
                if slug not in self.conditions:
                    raise ValueError(f"experiment {name} names the unknown condition {slug!r}")
            for bench in experiment.benches:
                if bench not in self.benches:
                    raise ValueError(f"experiment {name} names the unknown benchmark {bench!r}")
        for name, entry in self.benches.items():
            for bench in entry.beside:
                if bench not in self.benches:
                    raise ValueError(f"benchmark {name} names the unknown benchmark {bench!r}")
        return self

    def model(self, slug: str) -> ModelConfig:
        """The condition's architecture at the paper's size."""
        condition = self.conditions[slug]
        vocab_size = self.recipes[condition.recipe].vocab_size
        return ModelConfig(vocab_size=vocab_size, **condition.model)


@functools.cache
def load_experiments(folder: Path = PAPER) -> Paper:
    """Experiments and conditions below `folder`. Raises UserError naming the file and key."""
    conditions = read_toml(folder / "conditions.toml")
    experiments = read_toml(folder / "experiments.toml")
    if twice := sorted(conditions.keys() & experiments.keys()):
        raise UserError(
            f"{folder / 'experiments.toml'}: {twice[0]} stands in conditions.toml too; leave one"
        )
    try:
        return Paper.model_validate(conditions | experiments)
    except pydantic.ValidationError as error:
        raise one_line(error, str(folder)) from None
