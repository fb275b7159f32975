"""One benchmark from specification to record."""

import importlib

from mol.bench.common import without_tuning_by_length
from mol.ops.trusted import check_kernels
from mol.plan.spec import BenchSpec
from mol.store.record import Record
from mol.train.environment import completed, pick_device, start

CPU_NOTE = (
    "timed on a CPU with the project's own PyTorch operations at small lengths; "
    "the paper's figures are from GPUs"
)


def execute(spec: BenchSpec) -> Record:
    """Run a benchmark and describe it. Raises UserError if its device is absent, or is a GPU whose
    kernels fail their self-check."""
    bench = spec.bench
    device = pick_device(getattr(bench, "device", "cpu"))
    if device.type == "cuda":
        without_tuning_by_length()
    program = importlib.import_module(f"mol.bench.{bench.program}")
    started = start()
    checked = check_kernels(device)
    outcome = program.run(bench, device, spec.seed)
    timed_on_cpu = device.type == "cpu" and hasattr(bench, "repeats")
    notes = (*checked, *outcome.notes, *(CPU_NOTE,) * timed_on_cpu)
    return completed(spec, started, device, "bench", outcome.metrics, notes)
