"""One benchmark from specification to record."""

import importlib
from datetime import UTC, datetime

from mol.bench.common import without_tuning_by_length
from mol.plan.spec import BenchSpec
from mol.store.record import Record
from mol.train.environment import hardware, pick_device, provenance

CPU_NOTE = (
    "timed on a CPU with the project's own PyTorch operations at small lengths; "
    "the paper's figures are from GPUs"
)


def execute(spec: BenchSpec) -> Record:
    """Run a benchmark and describe it. Raises UserError if its device is absent."""
    bench = spec.bench
    device = pick_device(getattr(bench, "device", "cpu"))
    if device.type == "cuda":
        without_tuning_by_length()
    program = importlib.import_module(f"mol.bench.{bench.program}")
    started = datetime.now(UTC)
    outcome = program.run(bench, device, spec.seed)
    finished = datetime.now(UTC)
    timed_on_cpu = device.type == "cpu" and hasattr(bench, "repeats")
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status="complete",
        started=started,
        finished=finished,
        wall_s=(finished - started).total_seconds(),
        hardware=hardware(device),
        provenance=provenance("bench"),
        metrics=tuple(outcome.metrics),
        notes=(*outcome.notes, CPU_NOTE) if timed_on_cpu else tuple(outcome.notes),
    )
