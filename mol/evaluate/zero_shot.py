"""Zero-shot scores of a trained run: stock lm-eval tasks on prepared items (Tables 6 and 14)."""

import importlib.metadata
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from mol.base import UserError, sha256_file, write_atomic
from mol.data.meta import CorpusMeta, check_tokenizer, load_meta
from mol.data.overlap import overlap
from mol.data.tokenizers import load_tokenizer
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.items import TRUTHFULQA, TRUTHFULQA_ROWS, ItemIndex, load_index
from mol.evaluate.tasks import SETS, StockTasks, check_tasks, definition_hash, load_stock_tasks
from mol.model.transformer import LanguageModel
from mol.plan.spec import TrainSpec, ZeroShotSpec
from mol.store.record import Metric, Record, load_record, save_record
from mol.train.checkpoint import WEIGHTS, load_weights
from mol.train.environment import completed, start

METRICS = ("acc", "acc_norm")
SAMPLES = "samples.parquet"
BATCH = {"cpu": (8, 2048), "cuda": (64, 131_072)}  # sequences, padded tokens
OVERLAP_TOKENS = 50_000_000  # larger training splits take hours to decode


class Scores(NamedTuple):
    """Metrics, one row an item for `samples.parquet`, and what a reader must know."""

    metrics: tuple[Metric, ...]
    samples: pa.Table
    notes: tuple[str, ...]


def _sample_stderr(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def _labels(name: str, index: ItemIndex) -> dict[str, str]:
    """Another revision of TruthfulQA is another test; its label keeps it off the paper's rows."""
    if SETS[name] != TRUTHFULQA or index.sets[TRUTHFULQA]["validation"].rows == TRUTHFULQA_ROWS:
        return {"task": name}
    return {"task": name, "items": index.sets[TRUTHFULQA]["validation"].items_sha256[:12]}


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


def score(model: HarnessModel, stock: StockTasks, names: Sequence[str], index: ItemIndex) -> Scores:
    """Score `model` on the tasks `names` of `stock`.

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
        of_task = [
            _row(name, task, sample)
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
                    labels=_labels(name, index),
                )
            )
        version = stock.groups[name].version if name in stock.groups else members[0].VERSION
        shots = members[0].config.num_fewshot
        notes.append(
            f"{name}: task version {version}, definition {definition_hash(members)}, "
            f"{shots}-shot, {len(of_task)} items"
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


def _unavailable(names: Sequence[str], index: ItemIndex) -> dict[str, str]:
    """Tasks without items, each with the reason."""
    reason = (
        "not run, its items come only from the hub (truthfulqa/truthful_qa, multiple_choice) or "
        "from a file given to `mol zeroshot prepare --truthfulqa`"
    )
    return {name: reason for name in names if SETS[name] not in index.sets}


def _item_notes(names: Sequence[str], index: ItemIndex) -> list[str]:
    files = {
        (name, split): file
        for name in dict.fromkeys(SETS[name] for name in names)
        for split, file in index.sets[name].items()
    }
    return [
        f"items {name} {split}: {file.rows:,} rows, {file.items_sha256[:12]}, from {file.source}"
        + (
            f"; another item set than the hub's {TRUTHFULQA_ROWS}"
            if name == TRUTHFULQA and file.rows != TRUTHFULQA_ROWS
            else ""
        )
        for (name, split), file in files.items()
    ]


def load_trained(
    spec: ZeroShotSpec, results: Path, device: torch.device, progress: bool
) -> tuple[HarnessModel, Path, CorpusMeta, dict[str, str]]:
    """The trained model behind the harness's interface, its corpus folder and meta data, and
    the hashes that pin it. Raises UserError when the run, its corpus or its tokenizer is absent
    or another one than the weights were trained with."""
    folder = results / "runs" / spec.scale / spec.train_run
    trained = load_record(folder / "record.json").spec
    if not isinstance(trained, TrainSpec):
        raise UserError(f"{folder}: holds a {trained.kind} run, zero-shot needs a trained model")
    corpus = results / "data" / spec.scale / trained.data.folder
    meta = load_meta(corpus)
    if meta.eos_id is None:
        raise UserError(f"{corpus}: its tokenizer has no end-of-text token to condition on")
    check_tokenizer(corpus, meta)
    model = LanguageModel(trained.model)
    load_weights(folder, model, meta.tokenizer_sha256)
    batch_size, batch_tokens = BATCH[device.type]
    mixed = trained.precision == "bf16" and device.type == "cuda"
    adapter = HarnessModel(
        model.to(device).eval(),
        load_tokenizer(corpus),
        prefix_token=meta.eos_id,
        max_length=spec.max_length,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        device=device,
        autocast=torch.bfloat16 if mixed else None,
        progress=progress,
    )
    pins = {
        "train_run": spec.train_run,
        "weights_sha256": sha256_file(folder / WEIGHTS),
        "tokenizer_sha256": meta.tokenizer_sha256,
        "source": meta.source.name,
    }
    return adapter, corpus, meta, pins


def execute(
    spec: ZeroShotSpec,
    results: Path,
    items: Path,
    out: Path,
    device: torch.device,
    progress: bool = False,
) -> Record:
    """Score the run that `spec` names and leave config, record and `samples.parquet` in `out`.

    Raises UserError when the trained run, its tokenizer or the items are absent or wrong.
    """
    started = start()
    check_tasks(spec.tasks)
    index = load_index(items)
    absent = _unavailable(spec.tasks, index)
    names = tuple(name for name in spec.tasks if name not in absent)
    model, corpus, meta, pins = load_trained(spec, results, device, progress)
    stock = load_stock_tasks(names, items, index, spec.limit)
    scores = score(model, stock, names, index)
    notes = (
        f"lm_eval {importlib.metadata.version('lm_eval')}, prefix token {meta.eos_id} "
        f"({model.tokenizer.id_to_token(meta.eos_id)}), at most {spec.max_length} tokens of "
        f"input, {model.cut} longer requests lost their left end",
        *scores.notes,
        *(f"{name}: {reason}" for name, reason in absent.items()),
        *_item_notes(names, index),
        overlap_note(stock, corpus, meta),
    )
    buffer = io.BytesIO()
    pq.write_table(scores.samples, buffer, compression="zstd")
    write_atomic(out / SAMPLES, buffer.getvalue())
    pins |= {
        f"items_{name}_{split}_sha256": file.items_sha256
        for name in {SETS[name] for name in names}
        for split, file in index.sets[name].items()
    }
    record = completed(spec, started, device, "zeroshot", scores.metrics, notes, pins)
    save_record(out, record)
    return record
