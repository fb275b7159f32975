"""Zero-shot scores of a trained run: stock lm-eval tasks on prepared items (Tables 6 and 14)."""

import importlib.metadata
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from mol.base import UserError, read_json
from mol.data.meta import CorpusMeta
from mol.data.overlap import overlap
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.items import (
    TRUTHFULQA_ROWS,
    ItemFile,
    ItemSets,
    is_the_papers,
    load_index,
    load_sets,
    write_table,
)
from mol.evaluate.pairs import Answers
from mol.evaluate.tasks import SETS, StockTasks, check_tasks, definition_hash, load_stock_tasks
from mol.evaluate.trained import Trained, load_scorer, open_run, pins
from mol.plan.spec import ZeroShotSpec
from mol.store.record import Metric, Record, save_record
from mol.store.samples import OTHER, SAMPLES
from mol.train.environment import completed, start

METRICS = ("acc", "acc_norm")
CALIBRATION = "calibration.json"  # what `mol eval --calibrate` leaves below the results
OVERLAP_TOKENS = 100_000_000  # 65M take two minutes; the paper's billions would take hours


class Scores(NamedTuple):
    """Metrics, one row an item for `samples.parquet`, and what a reader must know."""

    metrics: tuple[Metric, ...]
    samples: pa.Table
    notes: tuple[str, ...]


def _sample_stderr(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _labels(name: str, stock: StockTasks, files: dict[str, ItemFile]) -> dict[str, str | int]:
    """The task and what scored it. On other items than the paper's it is another test: its name
    says so, which keeps it off the paper's rows, and the items' hash stands beside it."""
    members = stock.members(name)
    version = stock.groups[name].version if name in stock.groups else members[0].VERSION
    found: dict[str, str | int] = {
        "task": name,
        "harness": f"lm_eval {importlib.metadata.version('lm_eval')}",
        "task_version": str(version),
        "definition": definition_hash(members),
        "shots": members[0].config.num_fewshot,
    }
    if not is_the_papers(SETS[name], files):
        (file,) = files.values()
        found |= {"task": f"{name} {OTHER}", "items": file.items_sha256[:12]}
    return found


def _row(name: str, task: ConfigurableTask, sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": name,
        "subtask": task.config.task,
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "target": str(sample["target"]),
        **{metric: float(sample[metric]) if metric in sample else None for metric in METRICS},
        "nats": [float(nats) for nats, _ in sample["filtered_resps"]],
    }


def score(
    model: HarnessModel,
    stock: StockTasks,
    names: Sequence[str],
    files: dict[str, dict[str, ItemFile]],
) -> Scores:
    """Score `model` on the tasks `names` of `stock`; `files` says what their item sets are.

    Accuracies are fractions. A stderr is the harness's: of a mean, s / sqrt(n) in closed form
    (it bootstraps only other statistics); of MMLU, pooled within subjects. Where every subject
    has one item there is no such thing and the items count as one sample, which a note says.
    """
    found = evaluate(
        lm=model,
        task_dict={"tasks": stock.tasks, "groups": stock.groups, "group_map": {}},
        bootstrap_iters=1000,
        log_samples=True,
    )
    metrics, rows, notes = [], [], []
    for name in names:
        members = stock.members(name)
        labels = _labels(name, stock, files[SETS[name]])
        of_task = [
            _row(str(labels["task"]), task, sample)
            for task in members
            for sample in found["samples"][task.config.task]
        ]
        result = found["results"][name]
        for metric in METRICS:
            if f"{metric},none" not in result:
                continue
            stderr = result[f"{metric}_stderr,none"]
            if stderr == "N/A":
                stderr = _sample_stderr([row[metric] for row in of_task])
                if len(members) > 1:
                    notes.append(f"{name}: one item a subject, stderr over all items as one sample")
            metrics.append(
                Metric(
                    name=metric,
                    value=float(result[f"{metric},none"]),
                    unit="fraction",
                    n=len(of_task),
                    stderr=None if stderr is None else float(stderr),
                    labels=labels,
                )
            )
        notes.append(
            f"{name}: task version {labels['task_version']}, definition {labels['definition']}, "
            f"{labels['shots']}-shot, {len(of_task)} items"
        )
        rows += of_task
    return Scores(tuple(metrics), pa.Table.from_pylist(rows), tuple(notes))


def item_texts(task: ConfigurableTask) -> list[str]:
    """What a model reads of each scored item, one text for every option."""
    texts = []
    for doc in task.eval_docs:
        choices = task.doc_to_choice(doc)
        if task.multiple_input:
            texts += [f"{choice} {task.doc_to_target(doc)}" for choice in choices]
        else:
            texts += [f"{task.doc_to_text(doc)} {choice}" for choice in choices]
    return texts


def overlap_note(stock: StockTasks, corpus: Path, meta: CorpusMeta) -> str:
    """Whether the training split contains text of the scored items, as a note of the record."""
    tokens = meta.splits["train"].real_tokens
    if tokens > OVERLAP_TOKENS:
        return f"overlap with the training text: not checked, it holds {tokens:,} tokens"
    texts = [text for task in stock.tasks.values() for text in item_texts(task)]
    hits = len(overlap(texts, corpus))
    return (
        f"overlap with the training text: {hits} of {len(texts)} option texts share a run of "
        "13 words with it"
    )


def calibration_note(results: Path) -> str:
    """Whether this suite's scoring gave public GPT-2 its published figures, as a note of the
    record. Raises UserError for a file that is none of `mol eval --calibrate`'s."""
    path = results / CALIBRATION
    if not path.is_file():
        return "scoring not calibrated: `mol eval --calibrate` was not run"
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("reason"), str):
        raise UserError(f"{path}: no calibration; run `mol eval --calibrate` again")
    return f"scoring {found['reason']}"


def _other_scores(condition: str, metrics: Sequence[Metric]) -> list[str]:
    """Scores on other items than the paper's: they have no row beside its figures."""
    return [
        f"{condition}, {metric.labels['task']}: {metric.name} {100 * metric.value:.2f} +- "
        f"{100 * (metric.stderr or 0):.2f} (n = {metric.n})"
        for metric in metrics
        if str(metric.labels["task"]).endswith(OTHER)
    ]


def _item_notes(loaded: ItemSets) -> list[str]:
    return [
        f"items {name} {split}: {file.rows:,} rows, {file.items_sha256[:12]}, from {file.source}"
        + (
            ""
            if is_the_papers(name, files)
            else f"; another item set than the hub's {TRUTHFULQA_ROWS}, not compared with the paper"
        )
        for name, files in loaded.files.items()
        for split, file in files.items()
    ]


def _model(
    spec: ZeroShotSpec, trained: Trained, device: torch.device, progress: bool, file: Path | None
) -> tuple[HarnessModel, dict[str, str]]:
    """The model behind the harness's interface and the hashes that pin it; or, with `file`, the
    scores that it gave elsewhere."""
    if file is None:
        scorer = load_scorer(trained, spec.max_length, device, progress)
        found = pins(trained)
    else:
        scorer = Answers(file)
        found = scorer.head.provenance.data
        wanted = {"train_run": trained.run_id, "tokenizer_sha256": trained.meta.tokenizer_sha256}
        for key, value in wanted.items():
            if found.get(key) != value:
                raise UserError(f"{file}: its {key} is {found.get(key)}, the run's is {value}")
        if scorer.max_length != spec.max_length:
            raise UserError(
                f"{file}: scored with max_length = {scorer.max_length}, the run has "
                f"{spec.max_length}"
            )
    return HarnessModel(scorer, trained.tokenizer, prefix_token=trained.prefix_token), found


def execute(
    spec: ZeroShotSpec,
    results: Path,
    items: Path,
    out: Path,
    device: torch.device,
    progress: bool = False,
    answers: Path | None = None,
) -> Record:
    """Score the run that `spec` names and leave config, record and `samples.parquet` in `out`.

    A task whose items are absent or wrong is not run, which the record says. `answers` holds the
    model's scores when it ran on another machine; the record is then that machine's. Raises
    UserError when the trained run or its tokenizer is absent or wrong, or when no task is left.
    """
    started = start()
    check_tasks(spec.tasks)
    loaded = load_sets(items, load_index(items), tuple(SETS[name] for name in spec.tasks))
    absent = {n: loaded.missing[SETS[n]] for n in spec.tasks if SETS[n] in loaded.missing}
    names = tuple(name for name in spec.tasks if name not in absent)
    if not names:
        raise UserError(f"no task is left to run: {next(iter(absent.values()))}")
    trained = open_run(spec, results)
    model, pinned = _model(spec, trained, device, progress, answers)
    stock = load_stock_tasks(names, loaded.tables, spec.limit)
    scores = score(model, stock, names, loaded.files)
    prefix = trained.prefix_token
    notes = (
        f"lm_eval {importlib.metadata.version('lm_eval')}, prefix token {prefix} "
        f"({trained.tokenizer.id_to_token(prefix)}), at most {spec.max_length} tokens of "
        f"input, {model.scorer.cut} longer requests lost their left end",
        *scores.notes,
        *(f"{name}: not run, {reason}" for name, reason in absent.items()),
        *_item_notes(loaded),
        *_other_scores(spec.condition, scores.metrics),
        calibration_note(results),
        overlap_note(stock, trained.corpus, trained.meta),
    )
    write_table(out / SAMPLES, scores.samples)
    pinned |= {
        f"items_{name}_{split}_sha256": file.items_sha256
        for name, files in loaded.files.items()
        for split, file in files.items()
    }
    record = completed(spec, started, device, "zeroshot", scores.metrics, notes, pinned)
    if isinstance(model.scorer, Answers):
        head = model.scorer.head
        told = head.model_dump(include={"started", "finished", "wall_s"})
        where = head.provenance.model_copy(update={"data": pinned})
        record = record.model_copy(update=told | {"hardware": head.hardware, "provenance": where})
    save_record(out, record)
    return record
