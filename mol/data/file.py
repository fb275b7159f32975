"""The user's own text: txt, jsonl or parquet, read in bounded memory."""

import codecs
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from mol.base import UserError, digest, sha256_file
from mol.data.config import OWN_TEXT, Corpus, FileSource
from mol.data.meta import SourceInfo
from mol.data.sources import Text, side

PER_MILLE = 50  # of the documents, for a split that has no file of its own
BLOCK = 1 << 20  # bytes read at a time
LONGEST = 1 << 22  # characters; a longer paragraph is cut at white space
BLANK_LINE = re.compile(r"\n\s*\n")


def open_files(corpus: Corpus, source: FileSource) -> Text:
    """The files of `source`. A split without a file is held out of the training files by a hash of
    each document's text, so equal documents fall on one side. UserError, naming the file, if one
    is missing, empty, of an unknown kind, or the same as another split's."""
    paths = {name: tuple(map(Path, files)) for name, files in source.files().items()}
    hashes = {path: _hash(path) for files in paths.values() for path in files}
    seen: dict[str, str] = {}
    for name, files in paths.items():
        for path in files:
            if other := seen.get(hashes[path]):
                fix = f"leave {name} out" if name != other else "name it once"
                raise UserError(f"{path}: same content as the {other} file; {fix}")
            seen[hashes[path]] = name

    def documents(name: str) -> Iterator[str]:
        for path in paths.get(name, paths["train"]):
            for text in read_documents(path, source.column):
                if name not in paths or name == "train":
                    where = side(text, PER_MILLE)
                    if (where if where not in paths else "train") != name:
                        continue
                yield text

    files = {str(path): sha256 for path, sha256 in hashes.items()}
    info = SourceInfo(
        name=f"{OWN_TEXT} in place of {corpus}: {', '.join(path.name for path in hashes)}",
        files=files,
        sha256=digest(files, 64) if len(files) > 1 else next(iter(files.values())),
        license="not stated (own file)",
        note=f"in place of {corpus}, not the paper's corpus unless the file holds it",
    )
    return Text(info, documents)


def _hash(path: Path) -> str:
    if path.suffix not in READERS:
        raise UserError(f"{path}: unknown kind of file; need {', '.join(READERS)}")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: empty file; give one with text")
        return sha256_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct the path in the source") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it readable") from None


def read_documents(path: Path, column: str) -> Iterator[str]:
    """The documents of a file that are not blank; UserError at the first fault, or at the end if
    there was none. `column` is that of jsonl and parquet."""
    found = False
    for text in READERS[path.suffix](path, column):
        if text.strip():
            found = True
            yield text
    if not found:
        raise UserError(f"{path}: holds only blank documents; give a file with text")


def _txt(path: Path, column: str) -> Iterator[str]:
    """Paragraphs between blank lines."""
    pending = ""
    for block in _decoded(path):
        pending += block
        *whole, pending = BLANK_LINE.split(pending)
        yield from whole
        while len(pending) > LONGEST:
            cut = max(pending.rfind(" ", 1, LONGEST), pending.rfind("\n", 1, LONGEST))
            cut = cut if cut > 0 else LONGEST
            yield pending[:cut]
            pending = pending[cut:]
    yield pending


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, first = 0, True
    with open(path, "rb") as handle:
        while True:
            data = handle.read(BLOCK)
            carried = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - carried + error.start) from None
            if text and first:
                text, first = text.removeprefix("\ufeff"), False
            yield newlines.decode(text, final=not data)
            if not data:
                return
            offset += len(data)


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(f"{path}: not UTF-8 at byte {offset}; convert the file to UTF-8")


def _jsonl(path: Path, column: str) -> Iterator[str]:
    offset = 0
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8")) if line.strip() else None
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset + error.start) from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error}); one object a line") from None
            offset += len(line)
            if not line.strip():
                continue
            if not isinstance(row, dict):
                raise UserError(f"{where}: need an object with the key {column!r}")
            if column not in row:
                raise UserError(f"{where}: no key {column!r}; there are {_listed(row)}")
            if not isinstance(row[column], str):
                kind = type(row[column]).__name__
                raise UserError(f"{where}: {column!r} is of type {kind}, need a string")
            try:
                row[column].encode()
            except UnicodeEncodeError:
                raise UserError(f"{where}: {column!r} holds half a surrogate pair") from None
            yield row[column]


def _parquet(path: Path, column: str) -> Iterator[str]:
    rows = 0
    try:
        with parquet.ParquetFile(path) as table:
            schema = table.schema_arrow
            if column not in schema.names:
                raise UserError(f"{path}: no column {column!r}; there are {_listed(schema.names)}")
            kind = schema.field(column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UserError(f"{path}: column {column!r} is of type {kind}, need strings")
            for batch in table.iter_batches(1024, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise UserError(f"{path}, row {rows}: {column!r} is null, need a string")
                    rows += 1
                    yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {rows} or later: {column!r} is not UTF-8 ({error})") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: damaged parquet file ({reason}); write it again") from None


def _listed(names) -> str:
    return ", ".join(map(repr, names)) or "none"


READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
