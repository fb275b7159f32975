"""A full or read-only disk: one line, what was there is kept, and the next command continues."""

import json
import os
import shutil
import subprocess

import numpy as np
import pyarrow as pa
import pytest
from made_up_paper import write_paper
from processes import call
from synthetic import record_of, train_metrics, write_run
from tiny import STEPS, Place
from victims import command

from mol.base import write_atomic
from mol.plan.build import plan
from mol.store.export import digests, export
from mol.store.record import load_record
from mol.train.checkpoint import STATE, load_state

MIB = 1 << 20


class Disk:
    """A tmpfs of a given size in bytes."""

    def __init__(self, folder):
        self.folder = folder

    def mount(self, *options):
        return subprocess.run(["mount", *options, str(self.folder)], capture_output=True, text=True)

    def resize(self, size):
        self.mount("-o", f"remount,rw,size={size}").check_returncode()

    def read_only(self):
        self.mount("-o", "remount,ro").check_returncode()

    def used(self):
        found = os.statvfs(self.folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder)
    mounted = shutil.which("mount") and disk.mount("-t", "tmpfs", "-o", f"size={64 * MIB}", "mol")
    if not mounted or mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted and mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(folder)], check=True)


def one_line(done):
    assert done.code == 2 and done.err.count("\n") == 1, done
    return done.err


def test_disk_full_during_a_checkpoint(disk, uncut, tmp_path):
    place = Place(disk.folder / "results", uncut)
    first = call(tmp_path, command, place.train("--stop-after", "6"))
    assert first.code == 0, first.err
    kept = (place.run / STATE).read_bytes()
    disk.resize(disk.used() + len(kept) // 2 // 4096 * 4096)
    line = one_line(call(tmp_path, command, place.train()))
    assert f"{STATE}: cannot be written (No space left on device)" in line and "again" in line
    assert (place.run / STATE).read_bytes() == kept
    assert load_state(place.run, place.spec.run_id)["step"] == 6
    disk.resize(64 * MIB)
    done = call(tmp_path, command, place.train())
    assert done.code == 0, done.err
    assert place.curve() == uncut.curve


@pytest.mark.parametrize("written", ["model.safetensors", "curve.parquet", "record.json"])
def test_disk_full_at_the_end_of_a_run(disk, uncut, tmp_path, written):
    place = Place(disk.folder / "results", uncut)
    first = call(tmp_path, command, place.train("--stop-after", str(STEPS - 1)))
    assert first.code == 0, first.err
    ends = {path.name: path.stat().st_size for path in uncut.run.iterdir()}
    order = ["model.safetensors", "curve.parquet", "config.json", "record.json"]
    before = sum(-(-ends[name] // 4096) for name in order[: order.index(written)])
    disk.resize(disk.used() + 4096 * (before + 1))  # one for the lock of the run
    line = one_line(call(tmp_path, command, place.train("--checkpoint-every", "1000")))
    assert f"{written}: cannot be written (" in line and "No space left on device" in line
    assert not (place.run / "record.json").exists()
    assert load_state(place.run, place.spec.run_id)["step"] == STEPS - 1
    disk.resize(64 * MIB)
    done = call(tmp_path, command, place.train())
    assert done.code == 0, done.err
    assert place.curve() == uncut.curve
    assert load_record(place.run / "record.json").status == "complete"


@pytest.fixture
def store(disk, tmp_path):
    """The command line that builds a database on the disk, and the specifications it may hold."""
    paper = write_paper(tmp_path / "paper")
    options = ["--runs", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    options += ["--paper", str(paper), "--db", str(disk.folder / "mol.duckdb")]
    specs = [planned.spec for planned in plan("smoke", folder=paper)]
    return ["store", "build", *options], [spec for spec in specs if spec.kind == "train"]


def write_long(folder, spec, points):
    """A run whose curve has so many points that no file packs them small."""
    steps = np.arange(points)
    values = np.random.default_rng(spec.seed).random(points)
    curve = {"step": steps, "tokens": steps, "name": ["train_nll"] * points, "value": values}
    write_run(folder, record_of(spec, train_metrics(spec, 3.0)), pa.table(curve))


def test_disk_full_while_the_database_is_built(disk, store, tmp_path):
    build, specs = store
    write_long(tmp_path / "runs", specs[0], 1)
    assert call(tmp_path, command, build).code == 0
    db = disk.folder / "mol.duckdb"
    old = db.read_bytes()
    for spec in specs[1:4]:
        write_long(tmp_path / "runs", spec, 150_000)
    disk.resize(disk.used() + 2 * MIB)
    line = one_line(call(tmp_path, command, build))
    assert "mol.duckdb: cannot be written" in line and "No space left on device" in line
    assert db.read_bytes() == old
    assert [path.name for path in disk.folder.iterdir()] == [db.name]
    disk.resize(64 * MIB)
    done = call(tmp_path, command, build)
    assert done.code == 0 and "runs: 4" in done.out, done


def test_a_read_only_results_folder(disk, uncut, store, tmp_path):
    place = Place(disk.folder / "results", uncut)
    first = call(tmp_path, command, place.train("--stop-after", "6"))
    assert first.code == 0, first.err
    build, specs = store
    write_long(tmp_path / "runs", specs[0], 1)
    assert call(tmp_path, command, build).code == 0
    db = disk.folder / "mol.duckdb"
    content = digests(export(db, tmp_path / "before", "csv"))
    disk.read_only()
    assert "Read-only file system" in one_line(call(tmp_path, command, place.train()))
    assert "Read-only file system" in one_line(call(tmp_path, command, build))
    report = ["report", "--db", str(db), "--out", str(disk.folder / "tables")]
    report += ["--figures", str(disk.folder / "figures")]
    assert "Read-only file system" in one_line(call(tmp_path, command, report))
    track = ["track", "--mlflow", str(disk.folder / "mlflow.db"), *build[2:8]]
    done = call(tmp_path, command, track)
    assert done.code == 0 and "is not up to date" in done.err
    # What only reads works.
    assert digests(export(db, tmp_path / "after", "csv")) == content
    status = call(tmp_path, command, ["status", "--results", str(place.results)])
    assert status.code == 0, status.err
    disk.resize(64 * MIB)
    done = call(tmp_path, command, place.train())
    assert done.code == 0, done.err
    assert place.curve() == uncut.curve


def test_libraries_that_tell_of_a_full_disk_in_their_own_way(tmp_path):
    lines = (f"{i} words of text {i * i}" for i in range(2000))
    (tmp_path / "t.txt").write_text("\n\n".join(lines))
    spec = {
        "corpus": "fineweb_edu", "source": {"kind": "file", "train": str(tmp_path / "t.txt")},
        "tokenizer": "bpe", "vocab_size": 1000, "layout": {"kind": "packed"},
    }  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(spec))
    argv = ["data", "--spec", str(tmp_path / "s.json"), "--out", str(tmp_path / "corpus")]
    line = one_line(call(tmp_path, command, argv, 4096))  # the tokenizer's file is larger
    assert "corpus: cannot be written (File too large" in line
    assert not [path for path in tmp_path.iterdir() if "corpus" in path.name]
    assert call(tmp_path, command, argv).code == 0


def test_what_an_editor_left_beside_a_file_is_kept(tmp_path):
    (tmp_path / ".record.json.swp").write_text("an editor's")
    (tmp_path / ".record.json.a1b2c3d4").write_text("of a killed writer")
    write_atomic(tmp_path / "record.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".record.json.swp", "record.json"]


def test_a_file_may_not_grow_beyond_a_limit(place, uncut, tmp_path):
    """The same refusal from a quota, where no file system can be mounted."""
    first = call(tmp_path, command, place.train("--stop-after", "6"))
    assert first.code == 0, first.err
    kept = (place.run / STATE).read_bytes()
    line = one_line(call(tmp_path, command, place.train(), len(kept) // 2))
    assert f"{STATE}: cannot be written (File too large)" in line
    assert (place.run / STATE).read_bytes() == kept
    done = call(tmp_path, command, place.train())
    assert done.code == 0, done.err
    assert place.curve() == uncut.curve
