"""Start a command on GPUs of its own: `python -m mol.gpus COUNT COMMAND ...`.

Snakemake counts GPUs and assigns none, so each job takes a lock on every device that it uses and
becomes its command, which inherits the locks. The kernel drops them when the last process that
holds them ends, however it ends: a lock is never stale, and a GPU whose job lost its driver is
not given away while that job lives. A cluster's scheduler assigns devices itself; within its job
these are the only ones visible.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

POLL = 0.2  # seconds between looks at devices that are all taken


def devices() -> dict[str, str]:
    """Visible devices: what CUDA_VISIBLE_DEVICES calls each -> a name that is always the same.

    Without that variable all that `nvidia-smi` lists, by UUID.
    """
    uuids = _listed()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {uuid: uuid for uuid in uuids.values()}
    given = [name.strip() for name in visible.split(",") if name.strip()]
    return {name: uuids.get(name, name) for name in given if name != "-1"}


def _listed() -> dict[str, str]:
    """Index -> UUID of the machine's GPUs."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return dict(line.replace(" ", "").split(",") for line in lines)


def take(count: int) -> list[str]:
    """Lock `count` free devices and return their names, waiting until there are as many. The
    locks last as long as this process and those that inherit them. UserError where the machine
    has too few."""
    found = devices()
    if len(found) < count:
        from mol.base import UserError

        raise UserError(
            f"{count} GPU(s) wanted, {len(found)} visible (CUDA_VISIBLE_DEVICES, nvidia-smi); "
            "use a machine that has them, another scale, or fewer gpus_per_run"
        )
    # Devices are numbered from 0 within each job of a cluster, whichever they are.
    job = os.environ.get("SLURM_JOB_ID", "")
    folder = Path(tempfile.gettempdir()) / f"mol-gpus-{os.getuid()}{'-' * bool(job)}{job}"
    folder.mkdir(mode=0o700, exist_ok=True)
    told = False
    while True:
        # All or none, one chooser at a time: two jobs never wait for each other's half.
        with open(folder / "choosing", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            held: dict[str, int] = {}
            for name, unique in found.items():
                if len(held) < count and (handle := _try(folder / quote(unique, safe=""))):
                    held[name] = handle
            if len(held) == count:
                for handle in held.values():
                    os.set_inheritable(handle, True)
                return list(held)
            for handle in held.values():
                os.close(handle)
        if not told:
            print(f"mol: waiting for {count} of {len(found)} GPUs", file=sys.stderr, flush=True)
            told = True
        time.sleep(POLL)


def _try(lock: Path) -> int | None:
    """An open file that is locked, or None where another process has it."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def main(arguments: list[str]) -> int:
    """Become the command. Exit code 2 where the GPUs that it wants do not exist."""
    count, *command = arguments or ("",)
    if not count.isdecimal() or not command:
        print("mol: error: give how many GPUs, then the command", file=sys.stderr)
        return 2
    if int(count):
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(take(int(count)))
        except ValueError as error:  # UserError is one; importing it here would slow every job
            print(f"mol: error: {error}", file=sys.stderr)
            return 2
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
