"""GPUs are assigned, not only counted: real processes, device names that no machine has."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from mol.gpus import devices
from mol.plan.hashes import ROOT

# Writes when it starts and ends, and its devices.
WORK = "date +%s.%N > $0.start; sleep 0.4; date +%s.%N > $0.end; echo $CUDA_VISIBLE_DEVICES > $0.on"


@pytest.fixture
def machine(tmp_path):
    """The environment of a machine with two GPUs, whose locks nobody else holds."""
    (tmp_path / "locks").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return env | {"CUDA_VISIBLE_DEVICES": "seven,nine", "TMPDIR": str(tmp_path / "locks")}


def start(env, count, *command):
    return subprocess.Popen(
        [sys.executable, "-m", "mol.gpus", str(count), *map(str, command)],
        env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def spans(stems):
    """(start, end, devices) of every job that ran."""
    read = [
        [stem.with_suffix(f".{end}").read_text() for end in ("start", "end", "on")]
        for stem in stems
    ]
    return [(float(start), float(end), set(names.strip().split(","))) for start, end, names in read]


def assert_apart(found):
    """Jobs that overlapped in time had no device in common; some did overlap."""
    together = [
        (one, other)
        for one, other in itertools.combinations(found, 2)
        if one[0] < other[1] and other[0] < one[1]
    ]
    assert all(not one[2] & other[2] for one, other in together), found
    return together


def seen(path):
    """Wait until a job has written its file."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_jobs_of_one_gpu_never_share_it_and_two_see_different_ones(machine, tmp_path):
    stems = [tmp_path / f"job{i}" for i in range(6)]
    jobs = [start(machine, 1, "sh", "-c", WORK, stem) for stem in stems]
    assert [job.wait(60) for job in jobs] == [0] * 6
    found = spans(stems)
    assert {frozenset(names) for *_, names in found} == {frozenset({"seven"}), frozenset({"nine"})}
    assert assert_apart(found), "two GPUs, and never two jobs at a time"
    assert any("waiting for 1 of 2 GPUs" in job.stderr.read() for job in jobs)


def test_jobs_that_want_both_gpus_do_not_wait_for_each_others_half(machine, tmp_path):
    stems = [tmp_path / f"job{i}" for i in range(4)]
    jobs = [start(machine, 1 + i % 2, "sh", "-c", WORK, stem) for i, stem in enumerate(stems)]
    assert [job.wait(60) for job in jobs] == [0] * 4
    found = spans(stems)
    assert [len(names) for *_, names in found] == [1, 2, 1, 2]
    assert_apart(found)


def test_a_killed_job_frees_its_gpu_at_once(machine, tmp_path):
    machine["CUDA_VISIBLE_DEVICES"] = "seven"
    begun, stem = tmp_path / "begun", tmp_path / "next"
    program = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)"
    first = start(machine, 1, sys.executable, "-c", program)
    seen(begun)
    second = start(machine, 1, "sh", "-c", WORK, stem)
    assert "waiting for 1 of 1 GPUs" in second.stderr.readline()
    assert not stem.with_suffix(".start").exists()
    os.kill(first.pid, signal.SIGKILL)
    assert second.wait(20) == 0 and first.wait(20) == -signal.SIGKILL


def test_a_process_that_outlives_its_job_keeps_the_gpu(machine, tmp_path):
    """As a worker does whose launcher was killed: it still computes on the device."""
    machine["CUDA_VISIBLE_DEVICES"] = "seven"
    stem = tmp_path / "next"
    launcher = start(machine, 1, "sh", "-c", f"sleep 1.5 & echo $! > {tmp_path}/worker; wait")
    seen(tmp_path / "worker")
    os.kill(launcher.pid, signal.SIGKILL)
    killed = time.time()
    assert start(machine, 1, "sh", "-c", WORK, stem).wait(20) == 0
    ((began, *_),) = spans([stem])
    assert began - killed > 0.7


def test_a_command_keeps_its_arguments_and_its_exit_code(machine):
    job = start(machine, 0, "sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "*", "")
    assert job.wait(20) == 7 and job.stdout.read() == "a b|*||"


@pytest.mark.parametrize("visible", ["", "-1", "seven"])
def test_too_few_gpus_are_refused_in_one_line(machine, visible):
    job = start(machine | {"CUDA_VISIBLE_DEVICES": visible}, 2, "true")
    assert job.wait(20) == 2
    (line,) = job.stderr.read().splitlines()
    assert re.match(r"mol: error: 2 GPU\(s\) wanted, [01] visible", line)


def test_a_gpu_has_one_name_however_it_is_called(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa'\necho '1, GPU-bb'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices() == {"GPU-aa": "GPU-aa", "GPU-bb": "GPU-bb"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-aa")
    assert devices() == {"1": "GPU-bb", "GPU-aa": "GPU-aa"}


def test_the_profile_runs_a_job_a_gpu(machine, tmp_path):
    """Six jobs of a small workflow under profiles/gpu, which finds two GPUs by itself."""
    (tmp_path / "Snakefile").write_text(f"""
rule all:
    input:
        expand("job{{n}}.end", n=range(6)),


rule job:
    output:
        "job{{n}}.start",
        "job{{n}}.end",
    resources:
        gpu=1,
    shell:
        "{sys.executable} -m mol.gpus 1 sh -c '{WORK.replace("$0", "job{wildcards.n}")}'"
""")
    profile = ROOT / "profiles/gpu"
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", str(profile), "--cores", "6"],
        cwd=tmp_path, env=machine | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = spans([tmp_path / f"job{i}" for i in range(6)])
    assert {name for *_, names in found for name in names} == {"seven", "nine"}
    together = assert_apart(found)
    most = max(sum(a <= t < b for a, b, _ in found) for t, *_ in found)
    assert together and most == 2
    assert "waiting for" not in done.stderr, "snakemake started more jobs than there are GPUs"
