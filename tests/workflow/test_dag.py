"""The workflow: what an edit reruns, what an experiment needs, what nothing to do looks like.

Each test works on a copy of the project whose outputs are empty files, and asks for a dry run.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter

import pytest
from project_copy import copy_project

from mol.plan.build import plan
from mol.plan.hashes import ROOT


def dry_run(folder, *targets):
    """Rule name -> number of jobs that a dry run of `targets` would start."""
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "2", *targets],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = re.findall(r"^(\w+)\s+(\d+)\s*$", done.stderr + done.stdout, re.MULTILINE)
    return {name: int(count) for name, count in table if name != "total"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A project in which every output exists and is newer than its inputs."""
    folder = copy_project(tmp_path_factory.mktemp("project"))
    assert dry_run(folder, "paper_tables")["train"] == 63  # also writes specs and hashes
    outputs = [f"paper_tables/table{n:02}.{e}" for n in range(1, 15) for e in ("md", "csv", "tex")]
    outputs += ["paper_tables/index.html", "results/mol.duckdb", "results/.tracked"]
    outputs.append("results/data/zero_shot/items.json")
    figures = tomllib.loads((ROOT / "mol/paper/figures.toml").read_text())["figures"]
    outputs += [f"figures/{figure['id']}_smoke.{e}" for figure in figures for e in ("svg", "png")]
    for run in plan("smoke"):
        folder_of_run = f"results/runs/smoke/{run.run_id}"
        names = ["config.json", "record.json"]
        if run.spec.kind == "train":
            names += ["curve.parquet", "model.safetensors"]
            outputs.append(f"results/data/smoke/{run.spec.data.folder}/meta.json")
        elif run.spec.kind == "zeroshot":
            names.append("samples.parquet")
        outputs += [f"{folder_of_run}/{name}" for name in names]
    stamp = time.time() - 1000
    for path in folder.rglob("*"):
        os.utime(path, (stamp, stamp))
    for name in outputs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        rank = 3 if name.count("/") == 1 else 2
        rank = 4 if name.startswith(("paper_tables", "figures")) else rank
        rank = 1 if name.startswith("results/data") else rank
        if "zeroshot-" in name:
            rank = 2.5
        os.utime(path, (stamp + 10 * rank, stamp + 10 * rank))
    return folder


@pytest.fixture
def project(finished, tmp_path):
    """A private copy, times kept."""
    folder = tmp_path / "project"
    shutil.copytree(finished, folder)
    return folder


def edit(path, old=None, new="# edited\n"):
    text = path.read_text()
    assert old is None or text.count(old) == 1, f"{old!r} in {path}"
    path.write_text(text + new if old is None else text.replace(old, new))


def test_a_finished_project_has_nothing_to_do(finished):
    assert dry_run(finished, "paper_tables") == {}


def test_an_edit_of_the_report_reruns_only_the_report(project):
    edit(project / "mol/report/tables.py")
    assert dry_run(project, "paper_tables") == {"report": 1, "paper_tables": 1}


def test_an_edit_of_the_model_reruns_training_and_what_uses_models(project):
    edit(project / "mol/model/transformer.py")
    jobs = dry_run(project, "paper_tables")
    assert jobs["train"] == 63 and jobs["zero_shot"] == 3 and jobs["bench"] == 16
    assert "corpus" not in jobs


def test_an_edited_definition_reruns_its_experiment_alone(project):
    edit(
        project / "mol/paper/conditions.toml",
        'label = "CT-MoE + SE gate"',
        'label = "CT-MoE with SE gate"',
    )
    assert "train" not in dry_run(project, "paper_tables"), "a label is not a definition"
    edit(project / "mol/paper/conditions.toml", "se_hidden = 4", "se_hidden = 8")
    jobs = dry_run(project, "paper_tables")
    assert jobs["train"] == 1 and "bench" not in jobs and "zero_shot" not in jobs
    assert dry_run(project, "E03")["train"] == 1
    assert dry_run(project, "E05") == {} or dry_run(project, "E05") == {"E05": 1}


def test_an_experiment_runs_only_what_it_needs(project):
    shutil.rmtree(project / "results")
    jobs = dry_run(project, "E06")
    needed = [run for run in plan("smoke") if "E06" in run.experiments]
    assert jobs["train"] == len(needed) == 22
    assert jobs["corpus"] == 1 and not {"zero_shot", "bench", "report"} & jobs.keys()


def test_zero_shot_brings_the_models_it_scores(project):
    shutil.rmtree(project / "results")
    assert Counter(dry_run(project, "E12")) >= Counter(
        {"train": 3, "zero_shot": 3, "zero_shot_items": 1, "corpus": 1}
    )


def test_protocols_are_scored_on_demand_and_then_kept_up_to_date(project):
    jobs = dry_run(project, "protocols")
    assert jobs["protocol_matrix"] == 15 and not {"train", "database"} & jobs.keys()
    run = next(run for run in plan("smoke") if run.spec.condition == "dense-softmax-198m")
    (project / f"results/runs/smoke/{run.run_id}/protocols.json").write_text("")
    assert dry_run(project, "paper_tables") == {"database": 1, "report": 1, "paper_tables": 1}
    edit(project / "mol/evaluate/protocols.py")
    assert dry_run(project, "paper_tables")["protocol_matrix"] == 1


def test_a_lost_record_reruns_that_run_and_the_report(project):
    run = next(run for run in plan("smoke") if run.spec.condition == "dense-softmax-198m")
    (project / f"results/runs/smoke/{run.run_id}/record.json").unlink()
    jobs = dry_run(project, "paper_tables")
    assert jobs["train"] == 1 and jobs["database"] == 1 and jobs["report"] == 1


@pytest.mark.parametrize(
    "lost", ["figures/table02_smoke.svg", "figures/table12_smoke.png", "paper_tables/table07.tex"]
)
def test_a_lost_figure_or_table_is_drawn_again(project, lost):
    (project / lost).unlink()
    assert dry_run(project, "paper_tables") == {"report": 1, "paper_tables": 1}


def test_lost_zero_shot_samples_are_scored_again(project):
    run = next(run for run in plan("smoke") if run.spec.kind == "zeroshot")
    (project / f"results/runs/smoke/{run.run_id}/samples.parquet").unlink()
    # The record is what the target asks for, so the file is asked for by name.
    jobs = dry_run(project, f"results/runs/smoke/{run.run_id}/samples.parquet")
    assert jobs == {"zero_shot": 1}


def test_a_wrong_configuration_stops_with_the_key(project):
    edit(project / "config/config.yaml", "scale: smoke", "scale: enormous")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--dry-run", "--cores", "1"],
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(project)},
    )
    assert done.returncode != 0
    assert "scale" in done.stdout + done.stderr and "'enormous'" in done.stdout + done.stderr


def test_a_changed_text_file_prepares_its_corpus_anew(project):
    text = project / "own.txt"
    text.write_text("some text")
    edit(
        project / "config/config.yaml",
        "sources: {}",
        "sources: {fineweb_edu: {kind: file, train: own.txt}}",
    )
    planned = dry_run(project, "E10")
    assert planned["corpus"] == 1 and planned["train"] == 7
    specs = project / "results/specs/smoke/data"
    (folder,) = (p.stem for p in specs.glob("fineweb_edu-*.json") if "own.txt" in p.read_text())
    meta = project / f"results/data/smoke/{folder}/meta.json"
    meta.parent.mkdir(parents=True)
    later = time.time() + 10
    meta.write_text("")
    os.utime(meta, (later, later))
    assert "corpus" not in dry_run(project, "E10")
    text.write_text("another text")
    os.utime(text, (later + 10, later + 10))
    assert dry_run(project, "E10")["corpus"] == 1
