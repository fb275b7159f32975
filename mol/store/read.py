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

LINK = "is a link; copy what it leads to here"


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


def _folders(root: Path) -> Iterator[Path | Refusal]:
    """Folders with a record below `root`, in a stable order. What lies elsewhere is not followed:
    a linked folder is refused by name."""
    for place, subfolders, files in os.walk(root):
        subfolders.sort()
        folder = Path(place)
        for name in subfolders:
            if (folder / name).is_symlink():
                yield _refusal(root, folder / name, LINK)
        if "record.json" in files or "record.json" in subfolders:
            yield folder


def _refusal(root: Path, path: Path, reason: str) -> Refusal:
    name = f"{root.name}/{path.relative_to(root).as_posix()}"
    return Refusal(file=name, reason=reason.removeprefix(f"{path}: "))


def _read_curve(path: Path) -> pa.Table:
    if path.is_symlink():
        raise UserError(LINK)
    try:
        if not path.is_file():
            raise OSError("no regular file")
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
        if isinstance(folder, Refusal):
            yield folder
            continue
        path = folder / "record.json"
        try:
            if path.is_symlink():
                raise UserError(LINK)
            record = load_record(path)
            if placed and (problem := _misplaced(folder, record)):
                raise UserError(problem)
        except UserError as error:
            yield _refusal(root, path, str(error))
            continue
        curve = matrix = samples = None
        if record.spec.kind == "train" and record.status == "complete":
            try:
                curve = _read_curve(folder / "curve.parquet")
            except UserError as error:
                yield _refusal(root, folder / "curve.parquet", str(error))
        if os.path.lexists(folder / MATRIX):
            try:
                if (folder / MATRIX).is_symlink():
                    raise UserError(LINK)
                matrix = load_matrix(folder / MATRIX, record)
            except UserError as error:
                yield _refusal(root, folder / MATRIX, str(error))
        if record.spec.kind == "zeroshot" and os.path.lexists(folder / SAMPLES):
            try:
                if (folder / SAMPLES).is_symlink():
                    raise UserError(LINK)
                samples = read_samples(folder / SAMPLES)
            except UserError as error:
                yield _refusal(root, folder / SAMPLES, str(error))
        yield Found(
            run_id=record.run_id,
            record=record,
            curve=curve,
            matrix=matrix,
            samples=samples,
            source=f"{root.name}/{folder.relative_to(root).as_posix()}",
            notes=record.notes,
        )


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
