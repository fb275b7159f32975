"""What trains on several GPUs: the commands of a dry run, and what is refused."""

import os
import re
import subprocess
import sys

import pytest
from project_copy import copy_project


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("project"))


def dry_run(project, visible, *targets, **settings):
    """Exit code and words of a dry run under profiles/gpu on a machine with these GPUs."""
    config = [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "profiles/gpu", "-n", "-p",
         "--config", *config, "--", *targets],
        cwd=project, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(project), "CUDA_VISIBLE_DEVICES": visible},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


JOB = r"run_id=(.+)-s\d+-\w+\n(?:    .*\n)*    resources: .*gpu=(\d+).*\nShell command: (.*)"


def test_e11_trains_on_four_gpus_together_and_all_else_takes_one(project):
    code, said = dry_run(project, "a,b,c,d", "E03", "E12", scale="paper")
    assert code == 0, said
    found = {run: (int(gpus), command) for run, gpus, command in re.findall(JOB, said)}
    large = {"dense-1p3b", "dense-0p7b", "mol-2p08b"}
    alone = {"ct-moe", "ct-moe-se", *(f"zeroshot-{run}" for run in large)}
    assert found.keys() == large | alone
    python = sys.executable
    together = f"{python} -m torch.distributed.run --standalone --nproc-per-node 4 -m mol train "
    for run in large:
        gpus, command = found[run]
        assert gpus == 4 and f"{python} -m mol.gpus 4 {together}" in command
    for run in alone:
        gpus, command = found[run]
        assert gpus == 1 and f"{python} -m mol.gpus 1 {python} -m mol " in command


@pytest.mark.parametrize(
    ("visible", "target", "settings", "said"),
    [
        ("a,b", "E11", {"scale": "paper"}, "trains on 4 GPUs, 2 are here"),
        ("a,b,c,d,e", "E03", {"gpus_per_run": 5}, "5 GPUs for batches of 4 sequences"),
    ],
)
def test_gpus_that_cannot_be_are_refused_before_anything_starts(
    project, visible, target, settings, said
):
    code, output = dry_run(project, visible, target, **settings)
    assert code == 1 and "Job stats" not in output
    (line,) = [line for line in output.splitlines() if said in line]
    assert "gpus_per_run in config/config.yaml" in line
