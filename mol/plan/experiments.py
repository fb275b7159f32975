"""Read a paper's `conditions.toml` and `experiments.toml` into checked, frozen models."""

import functools
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import Field

from mol.base import Frozen, Size, Slug, UserError, checked, one_line, read_toml
from mol.data.config import Corpus, PackedLayout, PaddedLayout
from mol.model.config import ModelConfig
from mol.plan.spec import OptimSpec, Seed

PAPER = Path(__file__).parent.parent / "paper"


class Recipe(Frozen):
    """Corpus, tokens and schedule that several conditions share."""

    corpus: Corpus
    tokenizer: Literal["bpe", "gpt2"]
    vocab_size: Size
    layout: PaddedLayout | PackedLayout = Field(discriminator="kind")
    seq_len: Size
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
    # Conditions too large for the proxy scale, and those that stand in for them there.
    proxy: dict[Slug, Slug] = {}
    # Of the zero-shot tasks in the harness that the paper used.
    task_versions: dict[str, str] = {}
    gpus: Size = 1  # of each training run at the scale of the paper

    def at(self, scale: str) -> tuple[str, ...]:
        """The conditions that are trained at a scale."""
        return tuple(self.stand_in(slug, scale) for slug in self.conditions)

    def stand_in(self, slug: str, scale: str) -> str:
        """What is trained at a scale in the place of a condition: itself, as a rule."""
        return self.proxy.get(slug, slug) if scale == "proxy" else slug


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

    title: str = ""  # of the paper, and where to find it
    seeds: tuple[Seed, ...] = Field(min_length=1)
    recipes: dict[str, Recipe]
    conditions: dict[Slug, Condition]
    experiments: dict[Slug, Experiment]
    benches: dict[Slug, BenchEntry]

    @property
    def task_versions(self) -> dict[str, str]:
        """Of every zero-shot task in the harness that the paper used."""
        return {k: v for own in self.experiments.values() for k, v in own.task_versions.items()}

    @pydantic.model_validator(mode="after")
    def _check(self):
        for name, condition in self.conditions.items():
            if condition.recipe not in self.recipes:
                raise ValueError(f"condition {name} names the unknown recipe {condition.recipe!r}")
        for name, experiment in self.experiments.items():
            stand_ins = experiment.proxy.values()
            for slug in (*experiment.conditions, *experiment.three_seeds, *stand_ins):
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
        return ModelConfig.model_validate(condition.model | {"vocab_size": vocab_size})


def load_experiments(folder: Path = PAPER) -> Paper:
    """Experiments and conditions below `folder`. Raises UserError naming the file and key."""
    files = folder.resolve() / "conditions.toml", folder.resolve() / "experiments.toml"
    stamps = [(file, file.stat().st_mtime_ns) for file in files if file.exists()]
    return _load(folder, tuple(stamps))


@functools.lru_cache(maxsize=8)
def _load(folder: Path, stamps: tuple) -> Paper:
    conditions = read_toml(folder / "conditions.toml")
    experiments = read_toml(folder / "experiments.toml")
    if twice := sorted(conditions.keys() & experiments.keys()):
        raise UserError(
            f"{folder / 'experiments.toml'}: {twice[0]} stands in conditions.toml too; leave one"
        )
    paper = checked(Paper, conditions | experiments, folder)
    for slug in paper.conditions:
        try:
            paper.model(slug)
        except pydantic.ValidationError as error:
            source = f"{folder / 'conditions.toml'}: conditions.{slug}.model"
            raise one_line(error, source) from None
    return paper
