"""Made-up records for tests of the store and the report. No figure here was measured."""

import math
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mol.plan.build import plan
from mol.plan.spec import BenchSpec, RunSpec, TrainSpec, ZeroShotSpec
from mol.store.record import Hardware, Metric, Protocol, Provenance, Record, save_record

CPU = Hardware(device="cpu", name="Made-up CPU", threads=1, memory_gib=8.0)
H200 = Hardware(device="cuda", name="NVIDIA H200", threads=16, memory_gib=139.8)


def record_of(
    spec: RunSpec, metrics: list[Metric], *, hardware: Hardware = CPU, data=None, **changes
) -> Record:
    """A complete record of `spec` with the given figures."""
    provenance = Provenance(
        git_commit="0" * 40,
        dirty=False,
        code_sha256="1" * 64,
        versions={"python": "3.11", "torch": "2.13.0"},
        data=data or {"source": "a made-up source", "tokenizer_sha256": "2" * 64},
        command="mol train made-up",
    )
    fields = {
        "run_id": spec.run_id,
        "spec": spec,
        "status": "complete",
        "started": datetime(2026, 1, 1, 12, tzinfo=UTC),
        "finished": datetime(2026, 1, 1, 12, 1, tzinfo=UTC),
        "wall_s": 60.0,
        "hardware": hardware,
        "provenance": provenance,
        "metrics": tuple(metrics),
    }
    return Record(**(fields | changes))


def train_metrics(spec: TrainSpec, nll: float, *, stderr: float = 0.002) -> list[Metric]:
    """The figures of a training run whose masked validation loss is `nll` nat/token."""
    padded = spec.data.layout.kind == "padded"
    metrics = []
    for split in ("validation", "test"):
        for pad in ("masked", "pad_counted") if padded else ("none",):
            protocol = Protocol(
                tokenizer=f"{spec.data.tokenizer}:222222222222",
                pad=pad,
                layout="chunked" if padded else "stream",
                context=spec.seq_len,
                stride=spec.seq_len,
                split=split,
            )
            value = nll * (0.75 if pad == "pad_counted" else 1.0)
            ppl = math.exp(value)
            shared = {"protocol": protocol, "n": 20_000}
            metrics += [
                Metric(name="nll", value=value, unit="nat/token", stderr=stderr, **shared),
                Metric(name="ppl", value=ppl, unit="ppl/token", stderr=ppl * stderr, **shared),
            ]
    return metrics + [
        Metric(name="params_total", value=1e6, unit="count"),
        Metric(name="train_tokens_per_s", value=5e3, unit="token/s"),
        Metric(name="train_steps_per_s", value=20.0, unit="step/s"),
        Metric(name="epochs", value=0.5, unit="epoch"),
    ]


def curve_of(spec: TrainSpec, nll: float) -> pa.Table:
    """A loss that falls to `nll` at the last step, as the long table a run writes."""
    rows = []
    per_step = spec.optim.batch_size * spec.seq_len
    for step in range(spec.evaluation.every, spec.optim.steps + 1, spec.evaluation.every):
        loss = nll + 4.0 * math.exp(-4.0 * step / spec.optim.steps) - 4.0 * math.exp(-4.0)
        values = {"train_nll": loss, "validation_nll": loss, "lr": 1e-3, "tokens_per_s": 5e3}
        if spec.data.layout.kind == "padded":
            values["validation_nll_pad"] = 0.75 * loss
        rows += [(step, step * per_step, name, value) for name, value in values.items()]
    columns = list(zip(*rows, strict=True))
    return pa.table(dict(zip(("step", "tokens", "name", "value"), columns, strict=True)))


def write_run(runs_root: Path, record: Record, curve: pa.Table | None = None) -> Path:
    """Write a run where a job would: <scale>/<run_id>/."""
    folder = runs_root / record.spec.scale / record.run_id
    save_record(folder, record)
    if curve is not None:
        pq.write_table(curve, folder / "curve.parquet")
    return folder


def write_train(runs_root: Path, spec: TrainSpec, nll: float, **changes) -> Path:
    record = record_of(spec, train_metrics(spec, nll), **changes)
    return write_run(runs_root, record, curve_of(spec, nll))


# How a program runs on a CPU, as its labels say.
EAGER = {"mode": "eager", "attention": "flash", "statistic": "median"}


def bench_metrics(spec: BenchSpec) -> list[Metric]:
    """One figure for each case of the benchmark, in the names that the programs use."""

    def timing(name: str, value: float, unit: str, **labels) -> Metric:
        low, high = 0.99 * value, 1.01 * value
        return Metric(name=name, value=value, unit=unit, n=5, low=low, high=high, labels=labels)

    bench = spec.bench
    if bench.program == "prefill":
        return [
            timing("prefill_tokens_per_s", 2e6 / (i + 4), "token/s", model=model, length=length,
                   path="one_pass" if "mol" in model else "dense", **EAGER)
            for i, model in enumerate(bench.models) for length in bench.lengths
        ]  # fmt: skip
    if bench.program == "decode":
        return [
            timing("decode_ms", 1 + context / 1000, "ms/token", model=model, context=context,
                   cache=True, batch=1, mode="eager")
            for model in bench.models for context in bench.contexts
        ]  # fmt: skip
    if bench.program == "attention":
        return [
            timing("attention_ms", length / (100 if kind == "softmax" else 200), "ms",
                   attention=kind, length=length, mode="eager")
            for kind in ("softmax", "deltanet") for length in bench.lengths
        ]  # fmt: skip
    if bench.program == "dispatch":
        return [
            timing("dispatch_speedup", 1.5, "ratio", top_k=case.top_k, n_blocks=case.n_blocks,
                   mode=bench.run_as)
            for case in bench.cases
        ]  # fmt: skip
    if bench.program == "logit_diff":
        return [
            Metric(name="max_logit_diff", value=3e-7, unit="logit"),
            Metric(name="max_abs_logit", value=1.5, unit="logit"),
        ]
    return [
        Metric(name="params_reduction", value=0.4, unit="fraction"),
        Metric(name="all_reduce_per_stage", value=1.0, unit="count"),
    ]


def zero_shot_metrics(spec: ZeroShotSpec) -> list[Metric]:
    return [
        Metric(name=name, value=0.3, unit="fraction", n=8, stderr=0.05, labels={"task": task})
        for task in spec.tasks
        for name in ("acc", "acc_norm")
    ]


def made_up_nll(spec: TrainSpec) -> float:
    """A loss between 3 and 4 nat/token that depends on the run's name alone."""
    return 3.0 + int(spec.run_id[-6:], 16) / 0xFFFFFF


def write_library(runs_root: Path, scale: str = "smoke", hardware: Hardware = CPU) -> None:
    """A record for every planned run of `scale`, with curves: what a finished DAG leaves."""
    for planned in plan(scale):
        spec = planned.spec
        if isinstance(spec, TrainSpec):
            write_train(runs_root, spec, made_up_nll(spec), hardware=hardware)
        else:
            of_kind = zero_shot_metrics if isinstance(spec, ZeroShotSpec) else bench_metrics
            write_run(runs_root, record_of(spec, of_kind(spec), hardware=hardware))
