"""The paper's lm-eval 0.4.7 against the installed one: which tasks differ, and by how much.

Both score the same items with the same log-probabilities; the old one runs in a process of its own
from its wheel. What moves then is the harness: prompts, choices, metrics, aggregation.
"""

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from mol.base import UserError
from mol.data.wheel import Wheel, fetch
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.tasks import MMLU, MMLU_SHOTS, SETS, STOCK, load_stock_tasks
from mol.evaluate.zero_shot import score
from mol.store.samples import OTHER

PAPERS_WHEEL = Wheel(
    "lm-eval==0.4.7",
    "lm_eval-0.4.7-py3-none-any.whl",
    "d84a52580468fdc1d812e511db36e86679b69ee27f5a5e3dbd50f233d0bec69f",
    2_518_804,
    "MIT",
)
PROBE = Path(__file__).with_name("old_harness.py")  # not imported: it is for another lm-eval
# Where data come from, and labels for listings: no part of what a task scores.
NOT_SCORED = (
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "tag",
    "group",
    "metadata",
    "include",
)


class Change(NamedTuple):
    """One task under both versions; `score` maps metric -> (theirs, ours)."""

    task: str
    theirs: str  # version of the task
    ours: str
    differs: tuple[str, ...]  # keys of the definition and names of changed functions
    unlike_requests: int
    score: dict[str, tuple[float, float]]


class _Functions(yaml.SafeLoader):
    """`!function module.name` as that text."""


_Functions.add_constructor("!function", lambda loader, node: f"!function {node.value}")


def definition(path: Path) -> dict:
    """A task's YAML with what it includes, and the source of its folder's functions."""
    found = yaml.load(path.read_text("utf-8"), _Functions)
    if "include" in found:
        found = definition(path.parent / found["include"]) | found
    for value in list(found.values()):
        if isinstance(value, str) and value.startswith("!function "):
            module, _, name = value.removeprefix("!function ").rpartition(".")
            found[f"{name}()"] = _source(path.parent / f"{module}.py", name)
    return found


def _source(path: Path, name: str) -> str:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return ast.unparse(node)


def changed_keys(theirs: dict, ours: dict) -> tuple[str, ...]:
    """Keys of the definitions that decide scores and differ."""
    keys = sorted((theirs.keys() | ours.keys()) - set(NOT_SCORED))
    return tuple(key for key in keys if theirs.get(key) != ours.get(key))


def yaml_of(root: Path, name: str) -> Path:
    """The definition of one task below the harness's folder `tasks`."""
    folders = {"arc_easy": "arc", "arc_challenge": "arc"}
    folder = "truthfulqa" if name.startswith("truthfulqa") else folders.get(name, name)
    if name.startswith("mmlu_"):
        folder = "mmlu/default"
    file = "default" if name == "winogrande" else name
    return root / folder / f"{file}.yaml"


def shuffled_targets(table: pa.Table, seed: int = 0) -> pa.Table:
    """TruthfulQA with the options of mc2 in a random order: the old metric takes the right ones to
    come first."""
    rng, rows = random.Random(seed), table.to_pylist()
    for row in rows:
        targets = row["mc2_targets"]
        pairs = list(zip(targets["choices"], targets["labels"], strict=True))
        rng.shuffle(pairs)
        choices, labels = zip(*pairs, strict=True)
        row["mc2_targets"] = {"choices": list(choices), "labels": list(labels)}
    return pa.Table.from_pylist(rows, table.schema)


def compare(
    model: HarnessModel,
    names: Sequence[str],
    tables: dict[str, dict[str, pa.Table]],
    limit: int | None,
) -> list[Change]:
    """Each task under both versions, on the first `limit` items and `model`'s log-probabilities.

    Raises UserError when the old version cannot be had or does not run.
    """
    wheel = fetch(PAPERS_WHEEL)
    stock = load_stock_tasks(tuple(names), tables, limit)
    ours = _ours(model, stock, names)
    nats = {
        (*instance.args, instance.resps[0][0])
        for task in stock.tasks.values()
        for instance in task.instances
    }
    members = {name: [task.config.task for task in stock.members(name)] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "theirs"
        zipfile.ZipFile(wheel).extractall(root)
        jobs = {
            task.config.task: {
                "yaml": str(yaml_of(root / "lm_eval/tasks", task.config.task)),
                "files": _files(Path(scratch), task.config.task, task.dataset),
                "shots": MMLU_SHOTS if name == MMLU else 0,
            }
            for name in names
            for task in stock.members(name)
        }
        theirs = _run_old(root, Path(scratch), {"tasks": jobs, "nats": sorted(nats)})
        differs = {
            name: changed_keys(
                definition(yaml_of(root / "lm_eval/tasks", members[name][0])),
                definition(yaml_of(STOCK, members[name][0])),
            )
            for name in names
        }
    return [
        _change(name, [theirs[member] for member in members[name]], ours[name], differs[name])
        for name in names
    ]


def _ours(model: HarnessModel, stock, names: Sequence[str]) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for metric in score(model, stock, names, {SETS[name]: {} for name in names}).metrics:
        name = str(metric.labels["task"]).removesuffix(f" {OTHER}")
        version = str(stock.members(name)[0].VERSION)  # of MMLU a subject's, as in the old one
        entry = found.setdefault(name, {"version": version, "metrics": {}})
        entry["metrics"][metric.name] = metric.value
    return found


def _files(folder: Path, name: str, splits: dict) -> dict[str, str]:
    """Parquet files of a task's splits; an empty one is left to the scored split's items, which a
    task at no shots does not draw from."""
    files = {}
    for split, dataset in splits.items():
        path = folder / f"{name}.{split}.parquet"
        filled = dataset if len(dataset) else next(d for d in splits.values() if len(d))
        pq.write_table(filled.data.table.slice(0, len(filled)), path)
        files[split] = str(path)
    return files


def _run_old(root: Path, scratch: Path, job: dict) -> dict[str, dict]:
    """The old version's outcome by task."""
    job_path, out_path = scratch / "job.json", scratch / "out.json"
    job_path.write_text(json.dumps(job), "utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(scratch / "cache"),
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, "-P", str(PROBE), str(job_path), str(out_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or not out_path.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{PAPERS_WHEEL.requirement} does not run here: {last[:200]}")
    found = json.loads(out_path.read_text("utf-8"))
    assert found["version"] == PAPERS_WHEEL.requirement.partition("==")[2], found["version"]
    return found["tasks"]


def _change(name: str, theirs: list[dict], ours: dict, differs: tuple[str, ...]) -> Change:
    """A group's score is the mean over items, in both versions."""
    total = sum(task["items"] for task in theirs)
    metrics = {
        metric: (
            sum(task["items"] * task["metrics"][metric] for task in theirs) / total,
            value,
        )
        for metric, value in ours["metrics"].items()
    }
    unlike = sum(task["unknown"] for task in theirs)
    return Change(name, theirs[0]["version"], ours["version"], differs, unlike, metrics)
