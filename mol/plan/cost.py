"""What the runs of a plan cost: GPU-hours from a training speed that was measured on a GPU."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mol.model.config import ModelConfig
from mol.paper.printed import parse
from mol.paper.reported import load_paper
from mol.plan.build import Planned
from mol.plan.spec import RunSpec, TrainSpec
from mol.store.read import Found
from mol.store.record import Record
from mol.store.twins import read_runs

Shape = tuple[ModelConfig, int]  # and the length of its sequences


class Measured(NamedTuple):
    """A figure `train_tokens_per_s` of a complete run on a GPU."""

    spec: RunSpec
    labels: dict
    speed: "Speed"


class Speed(NamedTuple):
    """Training tokens a second of one GPU, which, and the run that measured it."""

    tokens_per_s: float
    gpu: str
    run_id: str

    def hours(self, tokens: float) -> float:
        """GPU-hours of training on so many tokens."""
        return tokens / self.tokens_per_s / 3600


class Cost(NamedTuple):
    """Of one training run. `hours` are those of its training steps on one GPU, None where no
    speed was measured; `paper` the GPU-hours that the paper states, None where it states none."""

    done: bool
    tokens: int
    hours: float | None
    speed: Speed | None
    paper: float | None


def records(results: Path) -> list[Record]:
    """Complete runs below `results`, own and shipped."""
    found = read_runs(results / "runs", results / "records")
    return [f.record for f in found if isinstance(f, Found) and f.record.status == "complete"]


def measured(found: Iterable[Record]) -> Iterator[Measured]:
    """The training speeds of records of a GPU."""
    for record in found:
        where = record.hardware
        for metric in record.metrics if where.device == "cuda" else ():
            if metric.name == "train_tokens_per_s":
                speed = Speed(metric.value / where.count, where.name, record.run_id)
                yield Measured(record.spec, metric.labels, speed)


def speeds(found: Iterable[Measured]) -> dict[Shape, Speed]:
    """The fastest speed measured for each model and length: by `mol bench train-step`, or by a
    finished training run, which trains the exact architecture at any scale but smoke."""
    best: dict[Shape, Speed] = {}
    for spec, labels, speed in found:
        shape = _shape(spec, labels)
        if shape is not None:
            best[shape] = max(best.get(shape, speed), speed)
    return best


def _shape(spec: RunSpec, labels: dict) -> Shape | None:
    if isinstance(spec, TrainSpec):
        return spec.model, spec.seq_len
    if spec.kind == "bench" and spec.bench.program == "train_step":
        case = spec.bench.cases[labels["model"]]
        return case.model, case.seq_len
    return None


def paper_hours() -> dict[str, float]:
    """GPU-hours of a condition as the paper states them: its wall time on a number of GPUs."""
    hours = {}
    for cell in load_paper().cells:
        gpus = re.match(r"(\d+)\s*×", cell.hardware)
        if cell.metric == "wall_s" and cell.unit == "h" and not cell.op and gpus:
            hours[cell.condition] = int(gpus[1]) * parse(cell.printed.removesuffix("h")).value
    return hours


def costs(runs: Iterable[Planned], results: Path) -> dict[str, Cost]:
    """The cost of each training run by its run_id."""
    found = records(results)
    done, best = {record.run_id for record in found}, speeds(measured(found))
    stated = paper_hours()
    priced = {}
    for run in runs:
        spec = run.spec
        if not isinstance(spec, TrainSpec):
            continue
        speed = best.get((spec.model, spec.seq_len))
        hours = None if speed is None else speed.hours(spec.tokens)
        paper = stated.get(spec.condition) if spec.scale == "paper" else None
        priced[run.run_id] = Cost(run.run_id in done, spec.tokens, hours, speed, paper)
    return priced


def summary(found: Iterable[Cost]) -> str:
    """In words: how many there are and on how many tokens, how many are done, what the others cost,
    and what the paper states for them."""
    found = list(found)
    left = [cost for cost in found if not cost.done]
    known = [cost.hours for cost in left if cost.hours is not None]
    tokens = sum(cost.tokens for cost in found)
    parts = [f"{len(found)} training run{'s' if len(found) != 1 else ''}"]
    parts.append(f"{tokens / 1e9:.3g}B tokens")
    if done := len(found) - len(left):
        parts.append(f"{done} done")
    if known:
        gpus = ", ".join(sorted({cost.speed.gpu for cost in left if cost.speed}))
        parts.append(f"{sum(known):,.2f} GPU-hours for {len(known)} to come ({gpus})")
    if unknown := len(left) - len(known):
        parts.append(f"{unknown} not measured")
    if stated := [cost.paper for cost in found if cost.paper is not None]:
        parts.append(f"the paper states {sum(stated):,.1f} for {len(stated)}")
    return ", ".join(parts)
