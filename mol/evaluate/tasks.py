"""lm-eval's own task definitions on prepared items: only the data source is redirected.

Prompts, few-shot examples, choices, metrics and their aggregation stay the harness's. A task
gets its splits through the definition's `custom_dataset` key. The training split that a task
names but does not draw from at its number of shots is there and empty, so that a wrong number
of shots fails instead of showing items that are scored.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval
import pyarrow as pa
import pyarrow.compute as pc
from lm_eval import utils
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from mol.base import UserError, digest
from mol.evaluate.items import TRUTHFULQA

datasets.disable_progress_bars()  # a bar for each task's items would bury what is said

STOCK = Path(lm_eval.__file__).parent / "tasks"
FOLDERS = ("hellaswag", "piqa", "winogrande", "arc", "truthfulqa", "mmlu/default")
CALIBRATION_FOLDERS = ("wikitext", "lambada")
MMLU = "mmlu"
MMLU_SHOTS = 5  # Appendix K; the others take none
SUBJECTS = 57
SETS = {
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "winogrande": "winogrande",
    "arc_easy": "arc_easy",
    "arc_challenge": "arc_challenge",
    "mmlu": "mmlu",
    "truthfulqa_mc1": TRUTHFULQA,
    "truthfulqa_mc2": TRUTHFULQA,
}  # task -> item set

# The harness compiles a prompt's template anew for every item: 1.5 ms each, 2.5 minutes for the
# 5-shot prompts of MMLU. A template is constant, so the first compilation serves all of them.
utils.env.from_string = functools.cache(utils.env.from_string)


class StockTasks(NamedTuple):
    """Tasks and groups as `lm_eval.evaluator.evaluate` takes them."""

    tasks: dict[str, ConfigurableTask]
    groups: dict[str, Group]

    def members(self, name: str) -> list[ConfigurableTask]:
        """The task of this name, or the tasks of the group."""
        return self.groups[name].get_all_tasks() if name in self.groups else [self.tasks[name]]


def check_tasks(names: tuple[str, ...]) -> None:
    """Raises UserError for a task this suite does not hold."""
    for name in names:
        if name not in SETS:
            raise UserError(f"task {name!r} is unknown; choose from {', '.join(SETS)}")


def items_per_task(name: str, limit: int | None) -> int | None:
    """Items of one harness task when `limit` are wanted: MMLU's are spread over its subjects,
    at least one each."""
    return limit if limit is None or name != MMLU else math.ceil(limit / SUBJECTS)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness warns of every task whose data come from a function, which all of ours do."""
    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _source(splits: dict[str, pa.Table]) -> Callable[..., datasets.DatasetDict]:
    """A loader for `custom_dataset`; the harness passes it the task's metadata."""

    def load(**_: Any) -> datasets.DatasetDict:
        return datasets.DatasetDict({name: datasets.Dataset(t) for name, t in splits.items()})

    return load


def _redirect(config: dict, splits: dict[str, pa.Table], limit: int | None) -> dict[str, Any]:
    """The override of one task: its splits and its number of shots."""
    scored = config.get("test_split") or config["validation_split"]
    table = splits[scored]
    given = dict(splits) | {scored: table.slice(0, limit) if limit else table}
    if training := config.get("training_split"):
        given.setdefault(training, table.slice(0, 0))
    shots = MMLU_SHOTS if config["dataset_path"] == "cais/mmlu" else 0
    return {"task": config["task"], "custom_dataset": _source(given), "num_fewshot": shots}


def load_stock_tasks(
    names: tuple[str, ...], tables: dict[str, dict[str, pa.Table]], limit: int | None = None
) -> StockTasks:
    """The harness's tasks `names` on `tables` (set -> split -> items), the first `limit` of each.

    Raises UserError for a task this suite does not hold.
    """
    check_tasks(names)
    manager = TaskManager(include_path=[STOCK / name for name in FOLDERS], include_defaults=False)
    definitions = {name: entry.cfg for name, entry in manager.task_index.items()}
    overrides: list[dict[str, Any]] = []
    for name in names:
        splits = tables[SETS[name]]
        count = items_per_task(name, limit)
        if name != MMLU:
            overrides.append(_redirect(definitions[name], splits, count))
            continue
        subjects = [c for c in definitions.values() if c and c.get("dataset_path") == "cais/mmlu"]
        assert len(subjects) == SUBJECTS
        for config in subjects:
            of_subject = {
                split: table.filter(pc.equal(table["subject"], config["dataset_name"]))
                for split, table in splits.items()
            }
            overrides.append(_redirect(config, of_subject, count))
    with _quiet():
        tasks = manager.load({"group": "zero_shot", "task": overrides})["tasks"]
    groups = {}
    if MMLU in names:
        groups[MMLU] = Group.from_config(dict(definitions[MMLU]))
        for name, task in tasks.items():
            if name.startswith("mmlu_"):
                groups[MMLU].add(task)
    return StockTasks(tasks, groups)


def stock_task(name: str, splits: dict[str, pa.Table]) -> ConfigurableTask:
    """One task of the harness, not among the paper's, on `splits`, at no shots."""
    folders = [STOCK / folder for folder in CALIBRATION_FOLDERS]
    manager = TaskManager(include_path=folders, include_defaults=False)
    override = _redirect(manager.task_index[name].cfg, splits, None)
    with _quiet():
        return manager.load({"group": "calibration", "task": [override]})["tasks"][name]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    return inspect.getsource(value) if callable(value) else str(value)


def definition_hash(tasks: list[ConfigurableTask]) -> str:
    """Twelve hex digits over the definitions (prompts, choices, metrics, the code of their
    functions), without where the data and the definition file lie."""
    left_out = ("custom_dataset", "dataset_path", "dataset_name", "metadata")
    configs = [vars(task.config).items() for task in tasks]
    kept = [{k: v for k, v in config if k not in left_out} for config in configs]
    return digest(_plain(kept), 12)
