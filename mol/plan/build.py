"""The plan: every run of a scale, each specification once, and which experiments share it."""

from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import Field

from mol.base import (
    FileName,
    Frozen,
    Size,
    UserError,
    checked,
    one_line,
    read_text,
    reason_of,
)
from mol.data.config import Corpus, Source
from mol.known import nearest
from mol.model.config import ModelConfig
from mol.plan.experiments import PAPER, Paper, load_experiments
from mol.plan.scale import smoke_model, train_spec
from mol.plan.spec import BenchSpec, RunSpec, ScaleName, TrainSpec, ZeroShotSpec

# Smoke scores a fixed handful of items, the first of each task (a subject, for MMLU).
ZERO_SHOT_LIMIT = {"smoke": 8, "proxy": None, "paper": None}
LONGEST = 1 << 20  # bytes of a configuration, which the parser reads for seconds a megabyte
ZERO_SHOT_LENGTH = {"smoke": 512, "proxy": 2048, "paper": 2048}


class Config(Frozen):
    """`config/config.yaml`: the scale and where each corpus comes from."""

    scale: ScaleName = "smoke"
    sources: dict[Corpus, Source] = {}
    truthfulqa: FileName | None = None  # a local file of the hub's multiple_choice items
    tracking: bool = True  # mirror the records into MLflow
    gpus_per_run: Size | None = None  # of a training run; None: as the plan has it


class Planned(Frozen):
    """One run of the plan and the experiments that use it."""

    run_id: str  # of the specification
    spec: RunSpec = Field(discriminator="kind")
    experiments: tuple[str, ...]
    gpus: int  # that the workflow gives the run; several train it together


class _PlainYaml(yaml.SafeLoader):
    """Refuses aliases and merged keys, by which few lines spell terabytes or hide what holds, and
    keys that stand twice."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are refused; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("merged keys (<<) are refused; write them out")
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"key {twice[0]!r} stands twice; leave one")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Any:
    """The value in a YAML file. Raises UserError naming the file."""
    try:
        return yaml.load(read_text(path, LONGEST), _PlainYaml)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; write it flat") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise UserError(f"{path}: line {line}: {error.problem}; correct the YAML there") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {reason_of(error)}") from None


def read_config(source: Path | dict[str, Any]) -> Config:
    """Check a configuration file, or the mapping that Snakemake read from it.

    Raises UserError naming the file and the key.
    """
    name = str(source) if isinstance(source, Path) else "config"
    raw = _read_yaml(source) if isinstance(source, Path) else source
    return checked(Config, {} if raw is None else raw, name)


def _bench(name: str, scale: ScaleName, folder: Path) -> BenchSpec:
    paper = load_experiments(folder)
    entry = paper.benches[name]

    def sized(slug: str) -> ModelConfig:
        model = paper.model(slug)
        shrink = scale == "smoke" and not entry.at_paper_size
        return smoke_model(model, model.vocab_size) if shrink else model

    arguments = {"program": entry.program} | (entry.model_extra or {})
    arguments |= entry.smoke if scale == "smoke" else entry.paper
    models = {slug: sized(slug) for slug in entry.models}
    if entry.program in ("logit_diff", "sharding"):
        (arguments["model"],) = models.values()
    elif models:
        arguments["models"] = models
    try:
        return BenchSpec(scale=scale, condition=name, bench=arguments)
    except pydantic.ValidationError as error:
        raise one_line(error, f"{folder / 'experiments.toml'}: benches.{name}") from None


def _train_specs(scale: ScaleName, config: Config, folder: Path) -> dict[str, list[TrainSpec]]:
    """Experiment id -> its training runs."""
    paper = load_experiments(folder)
    runs: dict[str, list[TrainSpec]] = {}
    for name, experiment in paper.experiments.items():
        for slug in experiment.at(scale):
            recipe = paper.recipes[paper.conditions[slug].recipe]
            seeds = paper.seeds if slug in experiment.three_seeds else paper.seeds[:1]
            spec = train_spec(slug, paper.model(slug), recipe, seeds[0], scale, config.sources)
            # Checked once: nothing else depends on the seed.
            specs = [spec.model_copy(update={"seed": seed}) for seed in seeds]
            runs.setdefault(name, []).extend(specs)
    return runs


def plan(
    scale: ScaleName = "smoke", config: Config | None = None, folder: Path = PAPER
) -> list[Planned]:
    """Every run of `scale`: training runs, then zero-shot, then benchmarks. Rows of the paper
    that share a specification share the run."""
    config = config or Config(scale=scale)
    paper = load_experiments(folder)
    specs: dict[str, RunSpec] = {}
    users: dict[str, list[str]] = {}

    def add(spec: RunSpec, experiment: str) -> None:
        run_id = spec.run_id
        specs.setdefault(run_id, spec)
        users.setdefault(run_id, []).append(experiment)

    trained = _train_specs(scale, config, folder)
    for name, runs in trained.items():
        for spec in runs:
            add(spec, name)
    for name, experiment in paper.experiments.items():
        for spec in trained.get(name, []) if experiment.zero_shot else []:
            zero_shot = ZeroShotSpec(
                scale=scale,
                condition=spec.condition,
                train_run=spec.run_id,
                tasks=experiment.zero_shot,
                limit=ZERO_SHOT_LIMIT[scale],
                max_length=ZERO_SHOT_LENGTH[scale],
                seed=spec.seed,
            )
            add(zero_shot, name)
    for name, experiment in paper.experiments.items():
        for bench in experiment.benches:
            add(_bench(bench, scale, folder), name)
    return [
        Planned(
            run_id=run_id, spec=spec, experiments=tuple(users[run_id]),
            gpus=_gpus(spec, users[run_id], config, paper),
        )
        for run_id, spec in specs.items()
    ]  # fmt: skip


def _gpus(spec: RunSpec, experiments: list[str], config: Config, paper: Paper) -> int:
    if spec.kind == "train" and config.gpus_per_run:
        return config.gpus_per_run
    if spec.kind == "train" and spec.scale == "paper":
        return max(paper.experiments[name].gpus for name in experiments)
    return int(spec.scale != "smoke")  # made for CPUs


def find_run(name: str, scale: ScaleName, config: Config | None = None, kind: str | None = None):
    """The planned run with this run_id, or the only one (of a kind) of this condition, or of this
    condition and seed ("mol-top3-s42").

    Raises UserError when there is none, or when a condition has several seeds.
    """
    runs = [run for run in plan(scale, config) if kind in (None, run.spec.kind)]
    exact = [run for run in runs if run.run_id == name]
    found = exact or [
        run
        for run in runs
        if name in (run.spec.condition, f"{run.spec.condition}-s{run.spec.seed}")
    ]
    if len(found) == 1:
        return found[0]
    what = f"{kind} run" if kind else "run"
    if not found:
        near = nearest(name, {run.spec.condition for run in runs} | {run.run_id for run in runs})
        raise UserError(
            f"no {what} {name!r} at scale {scale}; {near} `mol plan --scale {scale}` lists them"
        )
    options = ", ".join(run.run_id for run in found)
    raise UserError(f"{name!r} names {len(found)} runs at scale {scale}; choose one of {options}")
