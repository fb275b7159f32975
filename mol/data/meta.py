"""What lies in a prepared corpus folder, and the checks before anybody reads it."""

from functools import lru_cache
from pathlib import Path
from typing import Literal

import pydantic

from mol.base import Frozen, UserError, one_line, read_json, sha256_file
from mol.data.config import DataSpec

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
META, TOKENIZER, TOKEN_BYTES = "meta.json", "tokenizer.json", "token_bytes.npy"
CORPUS_FILES = {META, TOKENIZER, TOKEN_BYTES, *(f"{split}.bin" for split in SPLITS)}


class SourceInfo(Frozen):
    """Where the text came from. `sha256` is the file's own hash when there is one file, else the
    hash of `files` (name -> SHA-256, or for the hub name -> commit)."""

    name: str
    files: dict[str, str]
    sha256: str
    license: str
    note: str


class SplitMeta(Frozen):
    """One shard of little-endian uint16 token ids."""

    file: str
    sha256: str
    sequences: int | None  # rows of the padded layout; None for a packed stream
    tokens: int  # positions in the file, PAD and end-of-text included
    real_tokens: int  # without PAD; end-of-text counts
    words: int  # white-space separated, of the text whose tokens are in the file
    bytes: int  # UTF-8, of the same text
    documents: int  # paragraphs of the padded layout, documents of the packed one


class CorpusMeta(Frozen):
    """The content of meta.json."""

    spec: DataSpec
    source: SourceInfo
    tokenizer_sha256: str
    vocab_size: int  # as trained: a small text may not give as many tokens as asked for
    pad_id: int | None
    eos_id: int | None
    splits: dict[str, SplitMeta]  # train, validation, test, and the further texts by their names


def load_meta(folder: Path) -> CorpusMeta:
    """Read meta.json; UserError if it is missing or damaged."""
    path = Path(folder) / META
    if not path.exists():
        raise UserError(f"{path}: missing; prepare the corpus with `mol data`")
    try:
        return CorpusMeta.model_validate(read_json(path))
    except UserError as error:
        raise UserError(f"{error}; delete the folder to rebuild it") from None
    except pydantic.ValidationError as error:
        raise UserError(f"{one_line(error, str(path))}; delete the folder to rebuild it") from None


@lru_cache(maxsize=64)
def _sha256_once(path: Path, size: int, mtime_ns: int) -> str:
    return sha256_file(path)


def check_file(path: Path, sha256: str, size: int | None = None) -> None:
    """UserError unless `path` has this hash and size (bytes). The size is checked every time,
    the hash once a process unless the file changes."""
    try:
        found = path.stat()
    except OSError:
        raise UserError(f"{path}: missing; delete the folder and prepare it again") from None
    if size is not None and found.st_size != size:
        raise UserError(
            f"{path}: {found.st_size:,} bytes where {META} says {size:,}; "
            "delete the folder and prepare it again"
        )
    if _sha256_once(path.resolve(), found.st_size, found.st_mtime_ns) != sha256:
        raise UserError(
            f"{path}: its SHA-256 is not the one in {META}; delete the folder and prepare it again"
        )


def check_split(folder: Path, meta: CorpusMeta, split: str) -> Path:
    """Path of a split's shard after its size and hash were compared with meta.json."""
    if split not in meta.splits:
        raise UserError(f"{folder / META}: no split {split!r}, only {', '.join(meta.splits)}")
    entry = meta.splits[split]
    path = Path(folder) / entry.file
    check_file(path, entry.sha256, 2 * entry.tokens)
    return path


def check_tokenizer(folder: Path, meta: CorpusMeta, wanted: str | None = None) -> None:
    """UserError unless the folder's tokenizer is the one it was packed with and, where `wanted`
    is given (the hash a model was trained with), that one too."""
    check_file(Path(folder) / TOKENIZER, meta.tokenizer_sha256)
    if wanted is not None and wanted != meta.tokenizer_sha256:
        raise UserError(
            f"{folder}: tokenizer {meta.tokenizer_sha256[:12]}, but the model was trained with "
            f"{wanted[:12]}; prepare the corpus the model was trained on"
        )


def verify(folder: Path, meta: CorpusMeta) -> None:
    """Check tokenizer and shards against meta.json."""
    check_tokenizer(folder, meta)
    for split in meta.splits:
        check_split(folder, meta, split)
