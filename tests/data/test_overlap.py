"""Evaluation items in the training shard are found, wherever rows or blocks cut them."""

import pytest

from mol.base import UserError
from mol.data import overlap as module
from mol.data.ngrams import ngrams
from mol.data.overlap import overlap
from mol.data.packing import prepare

LAYOUTS = [{"kind": "packed"}, {"kind": "padded", "chunk": 16, "min_chunk": 8}]
ITEM = "the quick red fox ran over nine lazy dogs while seven old crows watched it from afar"


@pytest.fixture(params=LAYOUTS, ids=["packed", "padded"])
def folder(request, make_spec, tmp_path):
    rows = [f"In report {i} we saw that {ITEM}, number {i}." for i in range(60)]
    prepare(make_spec(rows, request.param), tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.mark.parametrize("block", [1 << 20, 40])
def test_items_that_were_trained_on_are_found(folder, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK", block)
    other = ITEM.replace("nine", "ten").replace("seven", "six")  # no 13 words in a row are left
    texts = [
        other,
        ITEM.upper().replace(" fox", ", [step] fox"),
        "lead in " + " ".join(ITEM.split()[2:15]) + " then something else",
        "nine lazy dogs while seven old crows",  # 7 words: too short to say anything
        "nine lazy dogs while seven old crows watched",  # 8 words: as a whole
        "nine lazy dogs while seven old crows slept",
        "",
    ]
    assert overlap(texts, folder) == [1, 2, 4]
    assert overlap([], folder) == []


def test_held_out_text_is_not_found(make_spec, tmp_path):
    """Validation documents of the same corpus do not count as trained on."""
    from mol.data.packing import open_text

    spec = make_spec([f"{ITEM.replace('nine', f'n{i}').replace('seven', f's{i}')}" * 2
                      for i in range(300)])  # fmt: skip
    prepare(spec, tmp_path / "corpus")
    text = open_text(spec)
    train, held = ([*text.documents(split)] for split in ("train", "test"))
    runs = [" ".join(document.split()[4:16]) for document in (*train, *held)]
    assert held and overlap(runs, tmp_path / "corpus") == [*range(len(train))]


def test_runs_of_words():
    assert ngrams("one two three") == set()
    assert ngrams("A b, c-d (e) f's g h") == {"a b c d e f s g h"}
    assert len(ngrams(" ".join(map(str, range(20))))) == 8


def test_a_damaged_corpus_is_refused(folder):
    (folder / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.bin"):
        overlap([ITEM], folder)
