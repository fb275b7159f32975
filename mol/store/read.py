"""Find and read the run folders below a results folder; name what cannot be read."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mol.base import UserError, canonical_json, reason_of, visible
from mol.store.matrix import MATRIX, Matrix, load_matrix
from mol.store.record import Record, load_record
from mol.store.samples import SAMPLES, read_samples

CURVE = pa.schema(
    [("step", pa.int64()), ("tokens", pa.int64()), ("name", pa.string()), ("value", pa.float64())]
)

CURVE_FILE = "curve.parquet"
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
    a linked folder, or one that cannot be read, is refused by name."""
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: is no folder; name the one that holds the runs")
    unread: list[OSError] = []
    for place, subfolders, files in os.walk(root, onerror=unread.append):
        subfolders.sort()
        folder = Path(place)
        for name in subfolders:
            if (folder / name).is_symlink():
                yield _refusal(root, folder / name, LINK)
        if "record.json" in files or "record.json" in subfolders:
            yield folder
    for error in unread:
        if os.path.lexists(error.filename):  # a results folder that is not there holds no run
            yield _refusal(root, Path(error.filename), f"{reason_of(error)}; make it readable")


def _refusal(root: Path, path: Path, reason: str) -> Refusal:
    return Refusal(file=_name(root, path), reason=visible(reason.removeprefix(f"{path}: ")))


def _name(root: Path, path: Path) -> str:
    """Where something lies, under the root's own name; printable whatever folders are called."""
    return visible(f"{root.name}/{path.relative_to(root).as_posix()}")


def _read_curve(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            # Threads cost more than they save on files of this size.
            table = file.read(CURVE.names, use_threads=False)
            if not table.schema.equals(CURVE):
                table = table.select(CURVE.names).cast(CURVE)
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"not a readable curve ({reason}); delete the folder to rerun") from None
    if any(column.null_count for column in table.columns):
        raise UserError("holds empty values; delete the folder to rerun")
    if not len(table) or pc.min(table["step"]).as_py() < 0:
        raise UserError("holds no point, or one before step 0; delete the folder to rerun")
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
        refused: list[Refusal] = []
        wanted = {
            CURVE_FILE: _read_curve,
            MATRIX: functools.partial(load_matrix, record=record),
            SAMPLES: read_samples,
        }
        if record.spec.kind != "train" or record.status != "complete":
            del wanted[CURVE_FILE]
        if record.spec.kind != "zeroshot":
            del wanted[SAMPLES]
        parts = {
            name: _part(root, folder / name, read, refused)
            for name, read in wanted.items()
            if name == CURVE_FILE or os.path.lexists(folder / name)
        }
        yield from refused
        yield Found(
            run_id=record.run_id,
            record=record,
            curve=parts.get(CURVE_FILE),
            matrix=parts.get(MATRIX),
            samples=parts.get(SAMPLES),
            source=_name(root, folder),
            notes=record.notes,
        )


def _part(root: Path, path: Path, read: Callable[[Path], Any], refused: list[Refusal]) -> Any:
    """What `read` makes of a file beside a record; None, and a refusal, where it makes nothing."""
    try:
        if path.is_symlink():
            raise UserError(LINK)
        if path.exists() and not path.is_file():
            raise UserError("is no regular file; delete the folder to rerun")
        return read(path)
    except UserError as error:
        refused.append(_refusal(root, path, str(error)))
        return None


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
        row = vars(metric) | {"run_id": found.run_id, "labels": canonical_json(metric.labels)}
        protocol = row.pop("protocol")
        for key in ("tokenizer", "pad", "layout", "context", "stride", "split"):
            row[key] = getattr(protocol, key, None)
        rows.append(row)
    return rows
