"""What a run ran on and from: hardware, versions, commit, code hash."""

import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from mol.base import UserError
from mol.model.counts import total_parameters
from mol.ops.collectives import world
from mol.plan.hashes import ROOT, Group, source_hash
from mol.plan.spec import RunSpec, TrainSpec
from mol.store.record import Hardware, Metric, Provenance, Record

PACKAGES = ("torch", "numpy", "tokenizers", "triton", "flash-linear-attention", "lm_eval")


def pick_device(name: str = "auto") -> torch.device:
    """`auto` takes the GPU where there is one. Raises UserError when the named one is absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no GPU here; use --device cpu")
    return torch.device(name)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def hardware(device: str | torch.device) -> Hardware:
    """Exact names: GPU as the driver gives it, CPU as the kernel does."""
    kind = torch.device(device).type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = _cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        device=kind,
        name=name,
        count=world() if kind == "cuda" else 1,
        threads=torch.get_num_threads(),
        memory_gib=round(memory / 2**30, 1),
    )


def check_fits(spec: TrainSpec, machine: Hardware, processes: int = 1) -> None:
    """UserError where the least that training needs is more than `processes` such devices have:
    weights, gradients and both moments in fp32, and each layer's input for one micro-batch. A
    system that runs out of memory would kill the process without a word."""
    rows = spec.optim.batch_size // spec.optim.accumulate * spec.seq_len
    inputs = 2 * rows * spec.model.d_model * spec.model.n_layers
    needed = (16 * total_parameters(spec.model) + inputs) / 2**30
    if needed > machine.memory_gib * processes:
        raise UserError(
            f"{spec.run_id}: needs {needed:,.0f} GiB at least, {machine.name} has "
            f"{machine.memory_gib:,.0f}; choose smaller sizes, or raise optim.accumulate"
        )


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(group: Group, data: dict[str, str] | None = None) -> Provenance:
    """Commit, cleanliness of the tree, versions and the hash of the code that decides `group`."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return Provenance(
        # A copy without its history (a cluster's node, a container) is told its commit, and
        # cannot tell whether anything changed since.
        git_commit=commit or os.environ.get("MOL_GIT_COMMIT"),
        dirty=None if commit is None or status is None else bool(status),
        code_sha256=source_hash(group),
        versions=_versions(),
        data=data or {},
        command=shlex.join(["mol", *sys.argv[1:]]),
    )


class Started(NamedTuple):
    """When a run began: the date for its record, and a clock that never goes back."""

    at: datetime
    clock: float


def start() -> Started:
    return Started(datetime.now(UTC), time.monotonic())


def completed(
    spec: RunSpec,
    started: Started,
    device: torch.device,
    group: Group,
    metrics: Sequence[Metric],
    notes: Sequence[str] = (),
    data: dict[str, str] | None = None,
) -> Record:
    """The record of a run that has just ended. Its finish is its start and the time that passed: a
    system clock that is set back meanwhile makes no run end before it began."""
    wall_s = time.monotonic() - started.clock
    return Record(
        run_id=spec.run_id,
        spec=spec,
        status="complete",
        started=started.at,
        finished=started.at + timedelta(seconds=wall_s),
        wall_s=wall_s,
        hardware=hardware(device),
        provenance=provenance(group, data),
        metrics=tuple(metrics),
        notes=tuple(notes),
    )
