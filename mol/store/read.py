"""Find and read the run folders below a results folder; name what cannot be read."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mol.base import UserError, canonical_json
from mol.store.matrix import MATRIX, Matrix, load_matrix
from mol.store.record import Record, load_record
from mol.store.samples import SAMPLES, read_samples

CURVE = pa.schema(
    [("step", pa.int64()), ("tokens", pa.int64()), ("name", pa.string()), ("value", pa.float64())]
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A readable run: its name in the database, its record, its curve, its protocol matrix and its
    scored items where it has them, its place under results/ and its notes."""

    run_id: str
    record: Record
    curve: pa.Table | None
    matrix: Matrix | None
    samples: pa.Table | None
    source: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A file that was left out; `reason` says why and what to do."""

    file: str
    reason: str


def _folders(root: Path) -> Iterator[Path]:
    """Folders with a record below `root`, in a stable order; links to folders are not followed."""
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        if "record.json" in files:
            yield Path(folder)


def _read_curve(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=CURVE.names).select(CURVE.names).cast(CURVE)
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"not a readable curve ({reason}); delete the folder to rerun") from None
    if any(column.null_count for column in table.columns):
        raise UserError("holds empty values; delete the folder to rerun")
    return table


def _misplaced(folder: Path, record: Record) -> str | None:
    """Why a record under the runs folder (<scale>/<run_id>/) does not belong where it lies."""
    place = f"{folder.parent.name}/{folder.name}"
    own = f"{record.spec.scale}/{record.run_id}"
    return None if place == own else f"lies in {place} but is {own}; move it there or delete it"


def read_folders(root: Path, *, placed: bool) -> Iterator[Found | Refusal]:
    """Every run below `root`, readable or refused.

    `placed`: the folder names must be <scale>/<run_id>, as a local run writes them. Shipped
    records may lie at any depth. A damaged curve is refused alone: its record was complete.
    """
    for folder in _folders(root):
        path = folder / "record.json"
        name = f"{root.name}/{path.relative_to(root).as_posix()}"
        if path.is_symlink():
            yield Refusal(file=name, reason="is a link; copy the file itself here")
            continue
        try:
            record = load_record(path)
        except UserError as error:
            yield Refusal(file=name, reason=str(error).removeprefix(f"{path}: "))
            continue
        problem = _misplaced(folder, record) if placed else None
        if problem:
            yield Refusal(file=name, reason=problem)
            continue
        curve = None
        if record.spec.kind == "train" and record.status == "complete":
            curve_path = folder / "curve.parquet"
            try:
                curve = _read_curve(curve_path)
            except UserError as error:
                file = f"{root.name}/{curve_path.relative_to(root).as_posix()}"
                yield Refusal(file=file, reason=str(error))
        matrix = None
        if (folder / MATRIX).exists():
            try:
                matrix = load_matrix(folder / MATRIX, record)
            except UserError as error:
                file = name.replace("record.json", MATRIX)
                yield Refusal(file=file, reason=str(error).removeprefix(f"{folder / MATRIX}: "))
        samples = None
        if record.spec.kind == "zeroshot" and (folder / SAMPLES).exists():
            try:
                samples = read_samples(folder / SAMPLES)
            except UserError as error:
                yield Refusal(file=name.replace("record.json", SAMPLES), reason=str(error))
        source = name.removesuffix("/record.json")
        yield Found(
            run_id=record.run_id, record=record, curve=curve, matrix=matrix,
            samples=samples, source=source, notes=record.notes,
        )  # fmt: skip


def _naive_utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment


def run_row(found: Found) -> dict:
    """The row of table `runs`."""
    record, spec = found.record, found.record.spec
    return {
        "run_id": found.run_id,
        "kind": spec.kind,
        "scale": spec.scale,
        "condition": spec.condition,
        "seed": spec.seed,
        "status": record.status,
        "reason": record.reason,
        "started": _naive_utc(record.started),
        "finished": _naive_utc(record.finished),
        "wall_s": record.wall_s,
        "device": record.hardware.device,
        "hardware": record.hardware.name,
        "hardware_count": record.hardware.count,
        "threads": record.hardware.threads,
        "memory_gib": record.hardware.memory_gib,
        "git_commit": record.provenance.git_commit,
        "dirty": record.provenance.dirty,
        "code_sha256": record.provenance.code_sha256,
        "command": record.provenance.command,
        "spec": canonical_json(spec),
        "versions": canonical_json(record.provenance.versions),
        "data": canonical_json(record.provenance.data),
        "notes": canonical_json(list(found.notes)),
        "source": found.source,
    }


def metric_rows(found: Found) -> list[dict]:
    """The rows of table `metrics`."""
    rows = []
    for metric in found.record.metrics:
        protocol = metric.protocol.model_dump() if metric.protocol else {}
        rows.append(
            {
                "run_id": found.run_id,
                **metric.model_dump(exclude={"protocol", "labels"}),
                **{
                    key: protocol.get(key)
                    for key in ("tokenizer", "pad", "layout", "context", "stride", "split")
                },
                "labels": canonical_json(metric.labels),
            }
        )
    return rows
