"""The project as a clone has it, for tests that run or change its workflow."""

import shutil
from pathlib import Path

from mol.plan.hashes import ROOT

COPIED = ("Snakefile", "rules", "profiles", "config", "mol")


def copy_project(folder: Path) -> Path:
    """Copy what the workflow consists of into `folder`."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder
