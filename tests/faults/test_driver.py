"""A killed driver, and two on one folder: the way out is printed, the next command continues."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hostile import BOMB
from made_up_paper import write_paper
from processes import call
from project_copy import copy_project
from victims import command

from mol.plan.build import plan, read_config
from mol.store.record import load_record


@pytest.fixture
def project(tmp_path):
    """A copy of the project whose paper is the made-up one, its text a file."""
    folder = tmp_path / "project"
    folder.mkdir()
    copy_project(folder)
    write_paper(folder / "mol" / "paper")
    lines = [f"w{i * i % 97} x{i % 13} y{i % 7} z{i % 101} v{i}" for i in range(8000)]
    paragraphs = [" ".join(lines[i : i + 10]) for i in range(0, 8000, 10)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    config = {"sources": {"wikitext103": {"kind": "file", "train": "text.txt"}}, "tracking": False}
    (folder / "config/config.yaml").write_text(json.dumps(config))
    return folder


def start(folder, *words):
    """A driver and, through its process group, all that it starts."""
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


def output(driver, code=0):
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == code, out
    return out


def test_the_driver_neither_expands_nor_executes_its_configuration(project):
    config = project / "config/config.yaml"
    config.write_text("__use_yte__: true\n? open('taken', 'w')\n: 1\n" + BOMB)
    refused = output(start(project, "--dry-run"), code=1)
    assert "aliases (*name) are refused" in refused and "Traceback" not in refused
    config.write_text(json.dumps({"truthfulqa": "a b; touch taken"}))
    items = "results/data/zero_shot/items.json"
    planned = output(start(project, "--dry-run", "--printshellcmds", items))
    assert "--truthfulqa 'a b; touch taken'" in planned
    assert not (project / "taken").exists()


def test_a_second_driver_and_a_killed_one(project):
    config = read_config(project / "config/config.yaml")
    wanted = plan("smoke", config, folder=project / "mol/paper")[0].run_id
    run = project / "results/runs/smoke" / wanted
    target = f"results/runs/smoke/{wanted}/record.json"
    driver = start(project, target)
    while not (run / ".lock").exists():
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.005)
    # The first driver and its training job are alive, but stand still.
    os.killpg(driver.pid, signal.SIGSTOP)
    try:
        refused = output(start(project, target), code=1)
        assert (
            "cannot be locked" in refused and "--unlock" in refused and "Traceback" not in refused
        )
        train = ["train", "--spec", f"results/specs/smoke/{wanted}.json", "--quiet"]
        done = call(project, command, train, None, project)
        assert done.code == 2 and re.search(r"process \d+ on \S+ trains this run; wait", done.err)
        assert not (run / "record.json").exists()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
    output(start(project, "--unlock"))
    output(start(project, target))
    assert load_record(run / "record.json").status == "complete"
    # The clock goes back an hour: what was written lies in the future, what is edited now does not.
    for path in run.iterdir():
        os.utime(path, (time.time() + 3600,) * 2)
    with open(project / "mol/train/loop.py", "a") as source:
        source.write("# edited\n")
    planned = output(start(project, "--dry-run"))
    assert re.search(rf"rule train:.*\n(.*\n)?.*output: .*{wanted}/record.json", planned)
