"""Batches read by a thread: the same ones, a state of what was taken, errors where they count."""

import threading

import pytest
import torch

from mol.data.config import DataSpec, FileSource
from mol.data.loader import TokenBatches
from mol.data.packing import prepare
from mol.data.read_ahead import ReadAhead


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ahead")
    (root / "text.txt").write_text("\n\n".join(f"paragraph {i} of stones" for i in range(200)))
    spec = DataSpec(
        corpus="fineweb_edu",
        source=FileSource(train=str(root / "text.txt")),
        tokenizer="bpe",
        vocab_size=290,
        layout={"kind": "packed"},
    )
    prepare(spec, root / "corpus")
    return root / "corpus"


@pytest.fixture
def batches(folder):
    made = []

    def make(depth=3):
        made.append(ReadAhead(TokenBatches(folder, "train", 15, 7, seed=2), depth))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not any(thread.name == "read ahead" for thread in threading.enumerate())


def same(a, b):
    return all(map(torch.equal, a, b))


def test_the_batches_are_the_ones_without_a_thread(folder, batches):
    ahead, plain = batches(), TokenBatches(folder, "train", 15, 7, seed=2)
    for _ in range(40):  # several epochs
        assert same(ahead.next(), plain.next())
        assert ahead.state_dict() == plain.state_dict() and ahead.epochs == plain.epochs


@pytest.mark.parametrize("taken", [0, 1, 9])
def test_a_state_goes_on_after_the_last_batch_taken(batches, taken):
    whole, first, second = (batches() for _ in range(3))
    for _ in range(taken):
        assert same(first.next(), whole.next())
    second.next()
    second.load_state_dict(first.state_dict())
    for _ in range(5):
        assert same(second.next(), whole.next())


def test_closing_forgets_what_was_read_ahead(batches):
    ahead, whole = batches(), batches()
    for _ in range(4):
        assert same(ahead.next(), whole.next())
        ahead.close()
        ahead.close()


def test_what_fails_while_reading_is_raised_by_next(batches, monkeypatch):
    ahead = batches()
    ahead.next()
    ahead.close()

    def broken(self):
        raise OSError("the disk is gone")

    monkeypatch.setattr(TokenBatches, "next", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.next()
    monkeypatch.undo()
    ahead.next()
