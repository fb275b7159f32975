"""The record a run leaves behind: what ran, on what, from what, and what came out."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from mol.base import Frozen, Size, UserError, one_line, read_json, write_atomic
from mol.plan.spec import RunSpec

SCHEMA_VERSION = 1

Unit = Literal[
    "nat/token", "ppl/token", "ppl/word", "bit/byte", "fraction", "count", "token/s", "step/s",
    "ms", "ms/token", "s", "step", "epoch", "byte", "ratio", "logit", "token",
]  # fmt: skip

Label = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]*$")]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what a column holds


class Protocol(Frozen):
    """How a perplexity was computed; figures with unlike protocols are never compared."""

    tokenizer: str  # "bpe:<sha256, 12 digits>" or "gpt2:<...>"
    pad: Literal["masked", "pad_counted", "none"]  # none: the data hold no PAD
    layout: Literal["chunked", "stream", "documents"]  # documents: each one of a stream alone
    context: Size
    stride: Size
    split: Literal["train", "validation", "test"]
    eos: Literal["as_prepared", "masked"] = "as_prepared"  # masked: between texts, not scored
    text: Literal["prepared", "raw"] = "prepared"  # raw: as published, not detokenized


class Metric(Frozen):
    """One measured figure. `n` counts what was averaged (tokens, items, repeats); `stderr` is
    in the metric's own unit; `labels` tell figures of one name apart (length, model, path)."""

    name: Label
    value: float
    unit: Unit
    n: int | None = Field(None, ge=0, lt=2**63)
    stderr: float | None = Field(None, ge=0)
    low: float | None = None  # smallest and largest of repeated timings
    high: float | None = None
    protocol: Protocol | None = None
    labels: dict[Label, Label | Whole | float | bool] = {}


class Hardware(Frozen):
    device: Literal["cpu", "cuda"]
    name: str  # exact GPU or CPU name
    count: Size = 1
    threads: Size
    memory_gib: float = Field(ge=0)


class Provenance(Frozen):
    """Versions and content hashes behind a run. `dirty`: uncommitted changes in the tree."""

    git_commit: str | None
    dirty: bool | None
    code_sha256: str  # of the source files that decide the result
    versions: dict[str, str]
    data: dict[str, str] = {}  # source, its sha256, tokenizer sha256, shards sha256
    command: str


class Record(Frozen):
    """One run, complete. Times are UTC."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    spec: RunSpec
    status: Literal["complete", "not run"]
    reason: str | None = None  # why not run
    started: datetime
    finished: datetime
    wall_s: float = Field(ge=0)
    hardware: Hardware
    provenance: Provenance
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...] = ()  # what a reader must know: "bench ran on CPU", "item set differs"


def save_record(folder: Path, record: Record) -> None:
    """Write `config.json`, then `record.json`, whole or not at all; the record comes last, so
    a folder with a record is a finished run."""
    write_atomic(folder / "config.json", record.spec.model_dump_json(indent=1) + "\n")
    write_atomic(folder / "record.json", record.model_dump_json(indent=1) + "\n")


def load_record(path: Path) -> Record:
    """Read and check one `record.json`. Raises UserError naming the file and the key."""
    try:
        raw = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; not a readable record: delete its folder to rerun") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is True or version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {version!r}, this code reads {SCHEMA_VERSION}; "
            "delete its folder to rerun"
        )
    try:
        record = Record.model_validate(raw)
    except pydantic.ValidationError as error:
        raise UserError(f"{one_line(error, str(path))}; delete its folder to rerun") from None
    if record.run_id != record.spec.run_id:
        raise UserError(
            f"{path}: run_id {record.run_id!r} is not its spec's {record.spec.run_id!r}; "
            "delete its folder to rerun"
        )
    return record
