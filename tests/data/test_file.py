"""Own files: what each kind gives, and one clear line for each fault."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from mol.base import UserError
from mol.data import file
from mol.data.config import FileSource
from mol.data.file import open_files, read_documents

TEXTS = ["first text", "second é 漢\nwith two lines", "third"]


def write_parquet(path, columns: dict):
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_txt_paragraphs_survive_any_block_size(tmp_path, monkeypatch, block, newline):
    monkeypatch.setattr(file, "BLOCK", block)
    path = tmp_path / "a.txt"
    content = "\ufeff" + "\n\n".join([TEXTS[0], " \t", TEXTS[1]]) + "\n \n\n" + TEXTS[2]
    path.write_bytes(content.replace("\n", newline).encode())
    assert [text.strip() for text in read_documents(path, "text")] == TEXTS


def test_a_very_long_line_is_cut_at_white_space_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "BLOCK", 64)
    monkeypatch.setattr(file, "LONGEST", 100)
    words = [f"word{i}" for i in range(500)]
    path = tmp_path / "a.txt"
    path.write_text(" ".join(words) + "x" * 1000)
    pieces = [*read_documents(path, "text")]
    assert max(map(len, pieces)) <= 164
    assert "".join(pieces) == " ".join(words) + "x" * 1000
    assert all(piece.split()[-1] in words for piece in pieces[:20])


def test_jsonl_and_parquet_give_the_column(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"id": 1, "body": text}) for text in TEXTS))
    assert [*read_documents(path, "body")] == TEXTS
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2, 3], "body": TEXTS})
    assert [*read_documents(path, "body")] == TEXTS


BAD_ROW = json.dumps({"text": "fine"}) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n\t\n", "a.txt: holds only blank documents"),
        ("a.txt", b"good\n\nca\xe9 bad", "a.txt: not UTF-8 at byte 8"),
        ("a.txt", "ends in half an é".encode()[:-1], "a.txt: not UTF-8 at byte 16"),
        ("a.jsonl", BAD_ROW.encode() + b'{"text": "\xff"}', "a.jsonl: not UTF-8 at byte 27"),
        ("a.jsonl", BAD_ROW.encode() + b'{"text": ', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", BAD_ROW.encode() + b'{"body": "x", "id": 1}',
         "a.jsonl, line 2: no key 'text'; there are 'body', 'id'"),
        ("a.jsonl", BAD_ROW.encode() + b'{"text": 3}',
         "a.jsonl, line 2: 'text' is of type int, need a string"),
        ("a.jsonl", b'["text"]', "a.jsonl, line 1: need an object with the key 'text'"),
        ("a.jsonl", b'{"text": " "}', "a.jsonl: holds only blank documents"),
        ("a.parquet", b"PAR1 not really", "a.parquet: damaged parquet file"),
    ],
)  # fmt: skip
def test_bad_content_is_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        [*read_documents(path, "text")]
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_the_offset_of_a_bad_byte_does_not_depend_on_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(file, "BLOCK", block)
    path = tmp_path / "a.txt"
    path.write_bytes("漢字é".encode() + b"\xe6\xbc" + b"A")
    with pytest.raises(UserError, match="not UTF-8 at byte 8"):
        [*read_documents(path, "text")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, "no column 'text'; there are 'body', 'id'"),
        ({"text": [1, 2]}, "column 'text' is of type int64, need strings"),
        ({"text": ["a", None]}, "row 1: 'text' is null, need a string"),
    ],
)
def test_wrong_parquet_columns_are_named(tmp_path, columns, message):
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(UserError) as error:
        [*read_documents(path, "text")]
    assert message in str(error.value)


def test_parquet_damaged_in_the_middle_is_found(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"text {i}" for i in range(5_000)]})
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged parquet file"):
        [*read_documents(path, "text")]


def test_wrong_paths_are_one_clear_line(tmp_path):
    def open_train(name: str):
        return open_files("fineweb_edu", FileSource(train=str(tmp_path / name)))

    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.docx").write_text("x")
    for name, message in [
        ("missing.txt", "missing.txt: no such file"),
        ("folder.txt", "folder.txt: is a folder; name a file"),
        ("empty.jsonl", "empty.jsonl: empty file"),
        ("text.docx", "text.docx: unknown kind of file; need .txt, .jsonl, .parquet"),
    ]:
        with pytest.raises(UserError, match=message):
            open_train(name)


def test_the_same_text_cannot_be_two_splits(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("equal")
    source = FileSource(train=str(tmp_path / "a.txt"), test=str(tmp_path / "b.txt"))
    with pytest.raises(UserError, match=r"b\.txt: same content as the train file"):
        open_files("fineweb_edu", source)
    twice = FileSource(train=(str(tmp_path / "a.txt"), str(tmp_path / "a.txt")))
    with pytest.raises(UserError, match="name it once"):
        open_files("fineweb_edu", twice)


def test_missing_splits_are_held_out_without_leaks(tmp_path):
    texts = [f"document {i % 700}" for i in range(1_000)]  # 300 occur twice
    train = tmp_path / "train.txt"
    train.write_text("\n\n".join(texts))
    text = open_files("fineweb_edu", FileSource(train=str(train)))
    parts = [[*text.documents(split)] for split in ("train", "validation", "test")]
    assert sorted(sum(parts, [])) == sorted(texts)
    assert not set(parts[0]) & set(parts[1]) | set(parts[0]) & set(parts[2])
    assert not set(parts[1]) & set(parts[2])
    assert all(20 < len(part) < 90 for part in parts[1:])  # about 5 % each
    own = tmp_path / "own.txt"
    own.write_text("another text")
    text = open_files("fineweb_edu", FileSource(train=str(train), validation=str(own)))
    assert [*text.documents("validation")] == ["another text"]
    assert [*text.documents("test")] == parts[2]
    assert len([*text.documents("train")]) == len(texts) - len(parts[2])


def test_several_training_files_are_read_in_order_and_held_out_alike(tmp_path):
    texts = [f"document {i}" for i in range(900)]
    for name, part in (("a", texts[:400]), ("b", texts[400:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    (tmp_path / "one.txt").write_text("\n\n".join(texts))
    parts = FileSource(train=tuple(str(tmp_path / f"{name}.txt") for name in "ab"))
    several, one = (
        open_files("fineweb_edu", source)
        for source in (parts, FileSource(train=str(tmp_path / "one.txt")))
    )
    for split in ("train", "validation", "test"):
        assert list(several.documents(split)) == list(one.documents(split))
    assert len(several.info.files) == 2
    again = FileSource(train=(str(tmp_path / "a.txt"),) * 2)
    with pytest.raises(UserError, match=r"a\.txt: same content as the train file"):
        open_files("fineweb_edu", again)
