"""Several gloo processes train as one does: curve, weights, checkpoints, and a rank that dies."""

import os
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import torch
from places import Place, make_spec
from ranks import together, train
from safetensors.torch import load_file

from mol.model.config import MoEFFNLayer
from mol.store.record import load_record
from mol.train.checkpoint import STATE, WEIGHTS

DDP, FSDP2 = 10**9, 1
# Rounding: sums over 12 sequences in another order, through eight steps of AdamW.
CLOSE = {"rel": 2e-4, "abs": 1e-6}


def check_equal(place, reference):
    curves = (pq.read_table(p.run / "curve.parquet") for p in (place, reference))
    rows, expected = (curve.to_pylist() for curve in curves)
    assert [row | {"value": 0} for row in rows] == [row | {"value": 0} for row in expected]
    assert {row["name"] for row in rows} >= {"train_nll", "balance", "grad_norm", "validation_nll"}
    for row, one in zip(rows, expected, strict=True):
        assert row["value"] == pytest.approx(one["value"], **CLOSE), row
    ours, theirs = (load_file(p.run / WEIGHTS) for p in (place, reference))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=2e-4)


CASES = {
    "ddp, micro-batches": (DDP, {"accumulate": 2}, {}),
    "ddp, PAD masked": (DDP, {"pad_targets": "masked"}, {}),
    "fsdp2, micro-batches, activations computed again": (
        FSDP2,
        {"accumulate": 2},
        {"checkpoint_activations": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(text, alone, tmp_path, case):
    """The one does without what changes no value, so that cases share it."""
    shard_from, optim, more = CASES[case]
    spec = make_spec(text.data, balance_alpha=1.0, **optim)
    place = Place(tmp_path, text, make_spec(text.data, balance_alpha=1.0, **optim, **more))
    for done in together(tmp_path, 2, train, place.argv(), shard_from):
        assert done.code == 0 and "Warning" not in done.err, done.err
    check_equal(place, alone(spec))
    record = load_record(place.run / "record.json")
    assert any(f"2 processes ({case.split(',')[0]})" in note for note in record.notes)
    assert not (place.run / STATE).exists()


@pytest.mark.parametrize("shard_from", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_a_checkpoint_of_two_is_resumed_by_three_then_by_one(text, alone, tmp_path, shard_from):
    spec = make_spec(text.data, balance_alpha=1.0)
    place = Place(tmp_path, text, spec)
    for world, stop in ((2, ["--stop-after", "3"]), (3, ["--stop-after", "5"]), (1, [])):
        for done in together(tmp_path, world, train, place.argv(*stop), shard_from):
            assert done.code == 0, done.err
        assert (place.run / STATE).exists() == bool(stop)
    check_equal(place, alone(spec))


def test_five_processes_share_a_batch_of_twelve(text, alone, tmp_path):
    """Shares of two and of three sequences; experts of the FFN kind have the same balance loss."""
    layer = MoEFFNLayer(n_heads=2, n_experts=4, top_k=2, d_ff=32)
    spec = make_spec(text.data, layer, steps=3, balance_alpha=1.0)
    place = Place(tmp_path, text, spec)
    for done in together(tmp_path, 5, train, place.argv(), DDP):
        assert done.code == 0, done.err
    check_equal(place, alone(spec))


def test_a_rank_that_dies_stops_the_others_and_leaves_the_checkpoint(text, alone, tmp_path):
    spec = make_spec(text.data, balance_alpha=1.0)
    place = Place(tmp_path, text, spec)
    argv = place.argv("--checkpoint-every", "2")
    first, second = together(tmp_path, 2, train, argv, DDP, (1, 5))
    assert (first.code, second.code) == (2, 9)
    (line,) = first.err.splitlines()
    assert "process 0 of 2 stops: another one ended" in line and "resumes" in line
    assert torch.load(place.run / STATE, weights_only=True)["step"] == 4
    for done in together(tmp_path, 1, train, argv, DDP):
        assert done.code == 0, done.err
    check_equal(place, alone(spec))


def test_more_processes_than_sequences_are_refused(text, tmp_path):
    place = Place(tmp_path, text, make_spec(text.data, batch_size=2, steps=3))
    for done in together(tmp_path, 3, train, place.argv(), DDP):
        assert done.code == 2
        (line,) = done.err.splitlines()
        assert "3 processes for batches of 2 sequences" in line


def test_torchrun_starts_it_and_takes_it_along_when_killed(text, alone, tmp_path):
    spec = make_spec(text.data, balance_alpha=1.0)
    place = Place(tmp_path, text, spec)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def start():
        return subprocess.Popen(
            [*launch, "-m", "mol", *place.argv("--checkpoint-every", "1")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    killed = start()
    until = time.monotonic() + 60
    while not (place.run / STATE).exists():
        assert killed.poll() is None and time.monotonic() < until, killed.communicate()
        time.sleep(0.01)
    killed.kill()
    killed.communicate()  # until the last process that holds its output is gone
    assert not (place.run / "record.json").exists()
    again = start()
    said, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert said.count(spec.run_id) == 1  # once
    check_equal(place, alone(spec))
