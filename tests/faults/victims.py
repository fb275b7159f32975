"""What the fault tests start, kill, starve and limit; a forked process finds it by name."""

import datetime
import os
import resource
import signal
import time
from pathlib import Path

import torch

from mol.cli import main
from mol.store.export import export
from mol.store.record import Record, save_record
from mol.train import environment
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


def set_clock_back(argv: list[str], step: int) -> int:
    """`mol train` on a machine whose clock is set back a day when `step` steps are done."""
    true_time, go_on, moved = time.time, Trainer.train_step, []

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    def train_step(trainer):
        if trainer.step == step:
            moved.append(86_400)
        return go_on(trainer)

    time.time = lambda: true_time() - sum(moved)
    environment.datetime, Trainer.train_step = Clock, train_step
    code = command(argv)
    assert moved
    return code


def mirror_at_once(path: Path, runs: list, experiments: list[str]) -> int:
    """One writer of a tracking store for each of `runs`, all begun at the same moment; how many
    failed. They are forked from here because importing the tracker takes longest."""
    import mlflow.store.tracking.sqlalchemy_workspace_store  # noqa: F401

    from mol.store.track_command import mirror

    gate, opened = os.pipe()
    writers = []
    for run in runs:
        writer = os.fork()
        if not writer:
            os.close(opened)
            os.read(gate, 1)  # returns when the last writer closes its end, which opens the gate
            mirror(path, [(run, experiments)])
            os._exit(0)
        writers.append(writer)
    os.close(opened)
    return sum(os.waitpid(writer, 0)[1] != 0 for writer in writers)


def train_when_told(argv: list[str], barrier) -> int:
    """`mol train` that stands still after its first step until the barrier opens."""
    go_on = Trainer.train_step

    def train_step(trainer):
        loss = go_on(trainer)
        if trainer.step == 1:
            barrier.wait(60)
            barrier.wait(60)
        return loss

    Trainer.train_step = train_step
    return command(argv)


def export_often(db: Path, folder: Path) -> None:
    """Every table of a database into one folder, a few times."""
    for _ in range(3):
        export(db, folder, "parquet")


def write_runs(runs_root: Path, record: Record, rows: list, times: int) -> None:
    """A job that writes its run `times` times, in the order in which training does."""
    folder = runs_root / record.spec.scale / record.run_id
    for _ in range(times):
        write_curve(folder / "curve.parquet", rows)
        save_record(folder, record)
