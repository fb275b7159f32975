"""`profiles/slurm` against a real Slurm: a part of the smoke suite, and GPUs as a resource."""

import random
import re
import subprocess
import sys

import pytest
from one_node import one_node, why_not
from project_copy import copy_project

from mol.plan.build import Config, plan
from mol.plan.hashes import ROOT
from mol.store.record import load_record

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
WORDS = "amber brook cedar delta ember fjord grove harbor inlet juniper kelp lagoon marsh".split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with one_node(tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("project"))


def snakemake(folder, cluster, *arguments):
    """Run snakemake under profiles/slurm."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", str(ROOT / "profiles/slurm"),
         "--default-resources", "mem_mb=1000", "runtime=5", "--latency-wait", "5",
         # No accounting database, and no 40 s until the first look at a job.
         "--slurm-status-command", "squeue", "--slurm-no-account",
         "--slurm-init-seconds-before-status-checks", "1",
         "--seconds-between-status-checks", "1", *arguments],
        cwd=folder, env=cluster | {"PYTHONPATH": str(folder)}, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done


def jobs(cluster):
    """What Slurm remembers of each job."""
    shown = subprocess.run(
        ["scontrol", "show", "job", "--oneliner"], env=cluster, capture_output=True, text=True
    ).stdout
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in shown.splitlines()]


def test_a_smoke_run_is_prepared_and_trained_by_slurm_on_two_gpus(cluster, project):
    pick = random.Random(0)
    text = [" ".join(pick.choices(WORDS, k=80)) for _ in range(1000)]
    (project / "text.txt").write_text("\n\n".join(text) + "\n")
    source = {"kind": "file", "train": "text.txt"}
    (project / "config/config.yaml").write_text(
        "scale: smoke\nsources:\n  wikitext103: { kind: file, train: text.txt }\ngpus_per_run: 2\n"
    )
    config = Config(sources={"wikitext103": source})
    (run,) = [r for r in plan("smoke", config) if r.spec.condition == "ct-moe"]
    record = project / f"results/runs/smoke/{run.run_id}/record.json"
    snakemake(project, cluster, str(record.relative_to(project)))
    assert any("trained by 2 processes" in note for note in load_record(record).notes)
    made = {
        job["Comment"].removeprefix("rule_").split("_wildcards")[0]: job for job in jobs(cluster)
    }
    assert made.keys() == {"corpus", "train"}
    assert {job["JobState"] for job in made.values()} == {"COMPLETED"}
    assert "gres:gpu:2" in made["train"]["TresPerJob"] and "TresPerJob" not in made["corpus"]
    assert made["train"]["NumNodes"] == "1" and int(made["train"]["NumCPUs"]) >= 2


def test_two_gpu_jobs_see_different_devices(cluster, tmp_path):
    """Each waits for the other, so they run at one time."""
    (tmp_path / "Snakefile").write_text(f"""
rule all:
    input:
        "a.on",
        "b.on",


rule job:
    output:
        "{{n}}.on",
    resources:
        gpu=1,
    shell:
        "touch {{wildcards.n}}.here; until test -e a.here -a -e b.here; do sleep 0.1; done; "
        "{sys.executable} -m mol.gpus 1 sh -c 'echo $CUDA_VISIBLE_DEVICES > {{output}}'"
""")
    cluster = cluster | {"PYTHONPATH": str(ROOT)}
    cluster.pop("CUDA_VISIBLE_DEVICES", None)
    snakemake(tmp_path, cluster)
    assert {(tmp_path / f"{n}.on").read_text().strip() for n in "ab"} == {"0", "1"}
