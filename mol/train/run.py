"""One run from specification to record: train, evaluate both held-out splits, write."""

import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from mol.data.config import FileSource
from mol.data.loader import eval_sequences
from mol.data.meta import CorpusMeta, load_meta
from mol.data.packing import further_texts
from mol.evaluate.dispatch_paths import computed_in_several_ways, path_metrics
from mol.evaluate.perplexity import (
    evaluate_split,
    mean_and_error,
    score,
    scoring_batch,
    text_size,
)
from mol.model.counts import active_parameters, total_parameters
from mol.ops.collectives import rank, world
from mol.ops.trusted import check_kernels
from mol.plan.spec import TrainSpec
from mol.store.record import Metric, Record, save_record
from mol.train.checkpoint import STATE, save_weights
from mol.train.distributed import way
from mol.train.environment import completed, start
from mol.train.loop import Trained, train, write_curve


def data_hashes(meta: CorpusMeta) -> dict[str, str]:
    """What a record says of its data: source, license and the hashes that pin it, the shards' and
    those of the user's own files."""
    shards = {f"{name}_sha256": split.sha256 for name, split in meta.splits.items()}
    files = {}
    if isinstance(meta.spec.source, FileSource):
        for name, paths in meta.spec.source.files().items():
            texts = (f"{Path(path).name} {meta.source.files[str(Path(path))]}" for path in paths)
            files[f"{name}_text"] = ", ".join(texts)
    return {
        "corpus": meta.spec.corpus,
        "source": meta.source.name,
        "source_sha256": meta.source.sha256,
        "license": meta.source.license,
        "tokenizer_sha256": meta.tokenizer_sha256,
        **shards,
        **files,
    }


def tokenizer_name(meta: CorpusMeta) -> str:
    """Name and hash of a tokenizer as protocols carry it."""
    return f"{meta.spec.tokenizer}:{meta.tokenizer_sha256[:12]}"


def _counts(spec: TrainSpec) -> list[Metric]:
    def active(rule: str) -> Metric:
        value = active_parameters(spec.model, rule)
        return Metric(name="params_active", value=value, unit="count", labels={"rule": rule})

    total = Metric(name="params_total", value=total_parameters(spec.model), unit="count")
    return [total, active("with_delta_extras"), active("without_delta_extras")]


def _speed(spec: TrainSpec, trained: Trained, device: torch.device) -> list[Metric]:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate, tokens = trained.steps_per_s, spec.optim.batch_size * spec.seq_len
    return [
        Metric(name="train_steps_per_s", value=rate, unit="step/s", n=trained.steps_done),
        Metric(name="train_tokens_per_s", value=rate * tokens, unit="token/s"),
        Metric(name="train_wall_s", value=trained.train_seconds, unit="s"),
        Metric(name="epochs", value=trained.epochs, unit="epoch"),
        Metric(name="peak_memory", value=peak, unit="byte"),
    ]


def _held_out(spec: TrainSpec, trained: Trained, corpus: Path, meta: CorpusMeta, device):
    for split in ("validation", "test"):
        yield from evaluate_split(
            trained.model,
            corpus,
            split,
            spec.seq_len,
            spec.evaluation.final_sequences,
            scoring_batch(spec.seq_len, device),
            device,
            tokenizer_name(meta),
            spec.data.layout.kind == "padded",
            spec.precision == "bf16",
        )


def _by_paths(spec: TrainSpec, trained: Trained, corpus: Path, device) -> list[Metric]:
    if not computed_in_several_ways(spec.model):
        return []
    how = spec.evaluation.final_sequences, device, spec.precision == "bf16"
    return path_metrics(trained.model, corpus, spec.seq_len, *how)


def _further(spec: TrainSpec, trained: Trained, corpus: Path, device) -> Iterator[Metric]:
    """Figures of the source's further texts. They have names of their own, so that nothing that
    looks for a corpus's perplexity finds another text's."""
    padded = spec.data.layout.kind == "padded"
    for name in further_texts(spec.data):
        sequences = eval_sequences(corpus, name, spec.seq_len, spec.evaluation.final_sequences)
        tally, targets = score(
            trained.model,
            sequences,
            scoring_batch(spec.seq_len, device),
            device,
            spec.precision == "bf16",
        )
        nll, error = mean_and_error(tally)
        labels = {"text": name, "context": spec.seq_len, "pad": "masked" if padded else "none"}
        bits = tally.nll_real / math.log(2) / text_size(corpus, targets)[0]
        found = (("nll", nll, "nat/token", error), ("bits_per_byte", bits, "bit/byte", None))
        for metric, value, unit, stderr in found:
            yield Metric(
                name=f"text_{metric}", value=value, unit=unit, n=tally.n_real, stderr=stderr,
                labels=labels,
            )  # fmt: skip


def execute(
    spec: TrainSpec, corpus: Path, out: Path, device: torch.device, **options
) -> Record | None:
    """Train and evaluate `spec`, leaving config, curve, weights and record in `out`.

    Returns None when `stop_after` ended the call before the last step: the checkpoint is then
    all there is. Of several processes the first alone writes. Other `options` are those of
    `mol.train.loop.train`.
    """
    started = start()
    meta = load_meta(corpus)
    notes = [f"text: {meta.source.name}", *check_kernels(device)]
    trained = train(spec, corpus, out, device, **options)
    if trained.steps_done < spec.optim.steps:
        return None
    if world() > 1:
        notes.append(f"trained by {world()} processes ({way(trained.model)}); memory of the first")
    notes += [f"some of the steps on {machine}" for machine in trained.elsewhere]
    metrics = [
        *_held_out(spec, trained, corpus, meta, device),
        *_further(spec, trained, corpus, device),
        *_by_paths(spec, trained, corpus, device),
        *_counts(spec),
        *_speed(spec, trained, device),
    ]
    assert all(math.isfinite(metric.value) for metric in metrics)
    save_weights(
        out,
        trained.model,
        {
            "run_id": spec.run_id,
            "tokenizer_sha256": meta.tokenizer_sha256,
            "config": json.dumps(spec.model.model_dump(mode="json")),
        },
    )
    record = completed(spec, started, device, "train", metrics, notes, data_hashes(meta))
    if rank() == 0:
        write_curve(out / "curve.parquet", trained.curve)
        save_record(out, record)
        (out / STATE).unlink(missing_ok=True)
    return record
