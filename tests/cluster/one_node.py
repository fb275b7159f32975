"""A Slurm cluster of one node, this machine: Debian's daemons under a configuration of their own.

Nothing outside the given folder is read or written, so a cluster that the machine belongs to, or
a second test, is not disturbed. The node has two GPUs by name; their device files are two that
every Linux has, since Slurm looks only whether such a file exists.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{os.environ['PATH']}:/usr/sbin"
GPU_FILES = ("/dev/full", "/dev/zero")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_min_interval=100000
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no cluster can be started here, or ""."""
    if missing := [name for name in DAEMONS if not shutil.which(name, path=PATH)]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    if not importlib.util.find_spec("snakemake_executor_plugin_slurm"):
        return "snakemake-executor-plugin-slurm is not installed (extra slurm)"
    return "" if os.geteuid() == 0 else "Slurm's daemons must be started by root"


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, wait until the node is idle, yield the environment that finds the
    cluster; end them at the end. RuntimeError, with their last words, where they do not come up."""
    for name in ("bin", "spool", "state"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    settings = {
        "folder": folder,
        "host": socket.gethostname().split(".")[0],
        "cpus": os.cpu_count(),
        "memory": pages * page // 2**20 * 9 // 10,  # MiB
        "controller_port": _free_port(),
        "node_port": _free_port(),
    }
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={name}\n" for name in GPU_FILES))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    env |= {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{PATH}",
    }
    # Snakemake starts a job's step without SLURM_ variables: on a cluster /etc/slurm is enough.
    srun = folder / "bin/srun"
    real = shutil.which("srun", path=PATH)
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {real} "$@"\n')
    srun.chmod(0o755)
    files = {
        "--socket": "munge.socket", "--key-file": "munge.key", "--pid-file": "munged.pid",
        "--seed-file": "munged.seed", "--log-file": "munged.log",
    }  # fmt: skip
    munge = [f"{option}={folder / name}" for option, name in files.items()]
    with contextlib.ExitStack() as running:
        # --force: the folder belongs to root, and may lie below one that all may write to.
        running.enter_context(_daemon(folder, env, "munged", "--foreground", "--force", *munge))
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        running.enter_context(_daemon(folder, env, "slurmctld", "-D"))
        running.enter_context(_daemon(folder, env, "slurmd", "-D"))
        _wait(lambda: "idle" in _ask(env, "sinfo", "-h", "-o", "%T"), folder)
        yield env
        _ask(env, "scancel", "--user=root", "--full")


@contextlib.contextmanager
def _daemon(folder: Path, env: dict[str, str], *command: str) -> Iterator[None]:
    with open(folder / f"{command[0]}.out", "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout


def _wait(ready, folder: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            said = [f"{p.name}: {p.read_text()[-500:]}" for p in sorted(folder.glob("*.out"))]
            raise RuntimeError("Slurm did not start; " + " | ".join(said))
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
