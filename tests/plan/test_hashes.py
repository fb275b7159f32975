"""An edit must touch the groups it can change, and no other."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mol.plan.hashes import GROUPS, ROOT, files_of, source_hash, write_changed


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "mol", tmp_path / "mol", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "groups"),
    [
        ("mol/model/transformer.py", {"train", "zeroshot", "bench"}),
        ("mol/ops/dispatch.py", {"train", "zeroshot", "bench"}),
        ("mol/train/loop.py", {"train"}),
        ("mol/data/packing.py", {"data"}),
        ("mol/report/tables.py", {"report"}),
        ("mol/evaluate/protocols.py", {"protocols"}),
        ("mol/evaluate/zero_shot.py", {"zeroshot"}),
        ("mol/bench/prefill.py", {"bench"}),
        ("mol/cli.py", set()),
        ("mol/plan/build.py", {"store"}),  # which runs are not made
    ],
)
def test_groups_touched_by_an_edit(tree, edited, groups):
    before = {group: source_hash(group, tree) for group in GROUPS}
    with open(tree / edited, "a") as handle:
        handle.write("# edited\n")
    after = {group: source_hash(group, tree) for group in GROUPS}
    assert {group for group in GROUPS if before[group] != after[group]} == groups


def test_every_pattern_finds_files():
    assert all(files_of(group) for group in GROUPS)
    for group, patterns in GROUPS.items():
        for pattern in patterns:
            assert list(ROOT.glob(pattern.lstrip("!"))), (group, pattern)


def test_the_database_follows_all_that_is_imported_to_make_it():
    code = "import mol.store.ingest, sys; print(*(m.__file__ for m in sys.modules.values() "
    code += "if m.__name__.startswith('mol.')), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {Path(name) for name in done.stdout.split() if not name.endswith("__init__.py")}
    assert len(loaded) > 20 and loaded <= set(files_of("store"))


def test_an_unchanged_file_keeps_its_time_and_a_changed_one_is_newer_than_results(tmp_path):
    folder = tmp_path / "specs"
    write_changed(folder, {"a": "one", "b": "one"})
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    ahead = time.time() + 1000  # results of a clock that went back since
    write_changed(folder, {"a": "one", "b": "two"}, ahead)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "one", "b": "two"}
    assert (folder / "a").stat().st_mtime_ns == before["a"]
    assert (folder / "b").stat().st_mtime > ahead
    assert list(tmp_path.iterdir()) == [folder], "the scratch folder is gone"
