"""What the fault tests start, kill, starve and limit; a forked process finds it by name."""

import os
import resource
import signal
from pathlib import Path

import torch

from mol.cli import main
from mol.store.record import Record, save_record
from mol.train.checkpoint import save_state
from mol.train.loop import Trainer, write_curve


def command(argv: list[str], file_limit: int | None = None, folder: Path | None = None) -> int:
    """`mol` with these arguments, in `folder`; files may not grow beyond `file_limit` bytes."""
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    if folder:
        os.chdir(folder)
    return main(argv)


def train_until_killed(argv: list[str], step: int) -> int:
    """`mol train`, killed as it begins the step after `step`."""
    go_on = Trainer.train_step

    def train_step(trainer):
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(trainer)

    Trainer.train_step = train_step
    return command(argv)


def save_states(folder: Path, size: int) -> None:
    """Checkpoints of one tensor that says which step it is of, without end."""
    step = 0
    while True:
        step += 1
        save_state(folder, {"run_id": "r", "step": step, "model": torch.full((size,), step)})


def save_records(folder: Path, record: Record) -> None:
    """The record of a run again and again, each time with another wall-clock time."""
    while True:
        record = record.model_copy(update={"wall_s": record.wall_s + 1})
        save_record(folder, record)


def write_curves(folder: Path, rows: list[tuple[int, int, str, float]]) -> None:
    """The curve of a run again and again, each time with other values."""
    value = 0.0
    while True:
        value += 1
        write_curve(folder / "curve.parquet", [(*row[:3], value) for row in rows])
