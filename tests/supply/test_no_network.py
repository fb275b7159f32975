"""No network at run time, but for `mol data` when its source asks: the kernel cuts it off."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mol.plan.hashes import ROOT

HERE = Path(__file__).parent


def cut_off(*command, **options):
    """Run a command in a network namespace of its own, which has no way out."""
    return subprocess.run(["unshare", "--net", *command], capture_output=True, text=True, **options)


def why_not() -> str:
    if not shutil.which("unshare"):
        return "no unshare (util-linux)"
    return "" if cut_off("true").returncode == 0 else "network namespaces need root"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_from_local_text_to_the_page_without_a_network(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MOL_"))}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/evaluate")]),
        "PIP_RETRIES": "0", "PIP_FIND_LINKS": "", "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    done = cut_off(sys.executable, HERE / "cut_off.py", tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["reachable"]
    *local, (name, code) = found["codes"]
    assert len(local) == 6 and {code for _, code in local} == {0}, (local, done.stderr[-3000:])
    assert (tmp_path / "paper_tables/index.html").stat().st_size > 100_000
    # Text from the Python index is the one thing that asked for the network, and it says so.
    assert (name, code) == ("data --spec", 2)
    assert done.stderr.strip().splitlines()[-1].startswith("mol data: ")
