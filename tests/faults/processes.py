"""Real processes for the fault tests, forked from a server that has loaded the libraries.

A process started from scratch spends two seconds on imports; these spend none, and are killed,
starved and limited like any other.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SERVED = ["mol.train.command", "mol.store.ingest"]
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(SERVED)


class Done(NamedTuple):
    code: int  # minus the signal's number where one ended it
    out: str
    err: str


def start(folder: Path, target: Callable, *args) -> multiprocessing.Process:
    """A process that runs `target(*args)`; its output goes to files in `folder`."""
    process = FORK.Process(target=_enter, args=(folder, target, args))
    process.start()
    return process


def finish(folder: Path, process: multiprocessing.Process) -> Done:
    process.join(120)
    assert process.exitcode is not None, "still running after two minutes"
    return Done(process.exitcode, *((folder / name).read_text() for name in ("out", "err")))


def call(folder: Path, target: Callable, *args) -> Done:
    return finish(folder, start(folder, target, *args))


def _enter(folder: Path, target: Callable, args: tuple) -> None:
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    try:
        code = target(*args) or 0
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def kill_at_random(
    folder: Path, target: Callable, *args, begun: Callable, moments: list[float], check: Callable
) -> None:
    """Start `target(*args)` once for each of `moments`, kill it so many seconds after `begun()`
    first gave another value than before it started, and `check()`."""
    for moment in moments:
        before = begun()
        process = start(folder, target, *args)
        while begun() == before and process.is_alive():
            time.sleep(0.001)
        time.sleep(moment)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        check()


def changed(path: Path) -> Callable[[], int | None]:
    """Tells when `path` was last written, or None while there is none."""
    return lambda: path.stat().st_mtime_ns if path.exists() else None


def spread(low: float, high: float, n: int) -> list[float]:
    """`n` moments between `low` and `high` seconds, the same in each run of the tests."""
    rng = random.Random(0)
    return [low + (high - low) * (i + rng.random()) / n for i in range(n)]
