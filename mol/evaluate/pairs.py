"""The harness's requests as a file of token ids, and a model's scores of them.

So that scoring runs on a machine without lm-eval: `Collector` stands in for a model and keeps what
the harness asks; the file is scored elsewhere (`score_file`); `Answers` stands in for that model
when the harness computes its metrics from the scores.
"""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from mol.base import Frozen, UserError, one_line, reason_of, write_atomic
from mol.evaluate.items import read_parquet
from mol.evaluate.scoring import Ids, Pair, Score, Scorer
from mol.store.record import Hardware, Provenance

AGAIN = "write it again with `mol zeroshot pairs`"
HEAD = b"mol"  # key of the file's head in the metadata of its schema
IDS = pa.list_(pa.int32())
ASKED = pa.schema([("context", IDS), ("options", pa.list_(IDS))])
SCORED = ASKED.append(pa.field("nats", pa.list_(pa.float64()))).append(
    pa.field("greedy", pa.list_(pa.bool_()))
)


class Head(Frozen):
    """Which tokenizer cut the pairs, and which items and tasks they are of."""

    tokenizer_sha256: str
    tasks: tuple[str, ...]
    limit: int | None
    items: dict[str, str]  # "set split" -> items_sha256


class AnswerHead(Head):
    """Besides: what scored them, where, and how long that took."""

    max_length: int
    cut: int
    started: datetime
    finished: datetime
    wall_s: float
    hardware: Hardware
    provenance: Provenance


class Collector:
    """Keeps the pairs it is asked for and answers all alike."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.cut = 0
        self.pairs: list[Pair] = []

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        self.pairs += [(tuple(context), tuple(option)) for context, option in pairs]
        return [(-1.0, False)] * len(pairs)


class Answers:
    """Looks scores up in a file that another machine wrote."""

    def __init__(self, path: Path):
        table, head = _read(path)
        try:
            self.head = AnswerHead.model_validate_json(head)
        except pydantic.ValidationError as error:
            raise one_line(error, str(path)) from None
        self.path, self.max_length, self.cut = path, self.head.max_length, self.head.cut
        self._known: dict[Pair, Score] = {}
        for row in _rows(path, table, SCORED):
            context = tuple(row["context"])
            for option, nats, greedy in zip(
                row["options"], row["nats"], row["greedy"], strict=True
            ):
                self._known[context, tuple(option)] = nats, greedy

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Raises UserError when the file lacks a pair."""
        try:
            return [self._known[tuple(context), tuple(option)] for context, option in pairs]
        except KeyError:
            raise UserError(
                f"{self.path}: lacks a request of these tasks and items; write the pairs again"
            ) from None


def write_pairs(path: Path, pairs: Sequence[Pair], head: Head) -> int:
    """Write each context once with its options; returns the number of contexts."""
    of_context: dict[Ids, dict[Ids, None]] = defaultdict(dict)
    for context, option in pairs:
        of_context[context][option] = None
    columns = {
        "context": list(of_context),
        "options": [list(options) for options in of_context.values()],
    }
    _write(path, pa.table(columns, ASKED), head)
    return len(of_context)


def score_file(
    pairs: Path, scorer: Scorer, tokenizer_sha256: str, vocab_size: int
) -> tuple[pa.Table, Head]:
    """The table of `pairs` with the columns nats and greedy. Raises UserError when the file is
    damaged, or its pairs were cut by another tokenizer than the model's."""
    table, raw = _read(pairs)
    try:
        head = Head.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise one_line(error, str(pairs)) from None
    if head.tokenizer_sha256 != tokenizer_sha256:
        raise UserError(
            f"{pairs}: cut by tokenizer {head.tokenizer_sha256[:12]}, the model's is "
            f"{tokenizer_sha256[:12]}; write the pairs with the model's tokenizer"
        )
    rows = _rows(pairs, table, ASKED)
    asked = [(row["context"], option) for row in rows for option in row["options"]]
    largest = max((max(*context, *option) for context, option in asked), default=0)
    if largest >= vocab_size:
        raise UserError(
            f"{pairs}: token {largest} is beyond the model's vocabulary of {vocab_size}; {AGAIN}"
        )
    scores = iter(scorer.score(asked))
    of_row = [[next(scores) for _ in row["options"]] for row in rows]
    nats = pa.array([[value for value, _ in row] for row in of_row], pa.list_(pa.float64()))
    greedy = pa.array([[equal for _, equal in row] for row in of_row], pa.list_(pa.bool_()))
    return table.append_column("nats", nats).append_column("greedy", greedy), head


def write_answers(path: Path, table: pa.Table, head: AnswerHead) -> None:
    _write(path, table, head)


def _write(path: Path, table: pa.Table, head: Head) -> None:
    buffer = io.BytesIO()
    table = table.replace_schema_metadata({HEAD: head.model_dump_json()})
    # Neighbors share their 5-shot prompt, which a dictionary of values cannot see.
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,
        write_page_checksum=True,  # a file that travels between machines
    )
    write_atomic(path, buffer.getvalue())


def _read(path: Path) -> tuple[pa.Table, bytes]:
    table = read_parquet(path)
    head = (table.schema.metadata or {}).get(HEAD)
    if head is None:
        raise UserError(f"{path}: no file of pairs; write one with `mol zeroshot pairs`")
    return table, head


def _rows(path: Path, table: pa.Table, schema: pa.Schema) -> list[dict]:
    """The rows as lists. Raises UserError for other columns, and for a row that is no request."""
    try:
        rows = table.select(schema.names).cast(schema).to_pylist()
    except (KeyError, pa.ArrowException) as error:
        raise UserError(f"{path}: {reason_of(error)}; {AGAIN}") from None
    for number, row in enumerate(rows):
        parts = [row["context"], *(row["options"] or [None])]
        whole = all(parts) and all(id is not None and id >= 0 for part in parts for id in part)
        scores = [row[name] or () for name in schema.names if name not in ASKED.names]
        whole = whole and all(None not in of and len(of) == len(row["options"]) for of in scores)
        if not whole or any(map(math.isnan, row.get("nats", ()))):
            raise UserError(f"{path}: row {number} is no request; {AGAIN}")
    return rows
