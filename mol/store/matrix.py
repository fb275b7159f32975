"""One checkpoint under every protocol: the file `protocols.json` beside a run's record."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pydantic

from mol.base import Frozen, UserError, one_line, read_json, write_atomic
from mol.store.record import Hardware, Metric, Protocol, Provenance, Record

MATRIX = "protocols.json"
AGAIN = "run `mol eval --protocols --save` again"


class MatrixRow(Metric):
    """A perplexity with its protocol; `note` says what a reader must know of that protocol."""

    protocol: Protocol
    note: str = ""


class Matrix(Frozen):
    """Content of `protocols.json`. `trained` is the finish of the record whose weights were
    scored: a run that was trained anew has another."""

    schema_version: Literal[1] = 1
    run_id: str
    trained: datetime
    seconds: float  # that scoring took
    hardware: Hardware
    provenance: Provenance
    rows: tuple[MatrixRow, ...]
    no_raw_text: str  # why no row scores the text as published; empty where some do


def save_matrix(folder: Path, matrix: Matrix) -> Path:
    """Write `protocols.json`, whole or not at all; returns its path."""
    write_atomic(folder / MATRIX, matrix.model_dump_json(indent=1) + "\n")
    return folder / MATRIX


def load_matrix(path: Path, record: Record) -> Matrix:
    """Read `protocols.json` of a run. Raises UserError, naming the file, when it is broken, or is
    not of this record."""
    try:
        matrix = Matrix.model_validate(read_json(path))
    except UserError as error:
        raise UserError(f"{error}; delete it or {AGAIN}") from None
    except pydantic.ValidationError as error:
        raise UserError(f"{one_line(error, str(path))}; delete it or {AGAIN}") from None
    if matrix.run_id != record.run_id:
        raise UserError(f"{path}: is of run {matrix.run_id}; delete it or {AGAIN}")
    if matrix.trained != record.finished:
        raise UserError(f"{path}: scored other weights, the run was trained anew; {AGAIN}")
    return matrix


def matrix_rows(matrix: Matrix) -> Iterator[dict[str, Any]]:
    """The rows of table `protocols`."""
    for row in matrix.rows:
        figure = row.model_dump(include={"name", "value", "unit", "n", "stderr", "note"})
        yield {"run_id": matrix.run_id, **figure, **row.protocol.model_dump()}
    if matrix.no_raw_text:
        reason = f"raw text: {matrix.no_raw_text}"
        yield {"run_id": matrix.run_id, "name": "ppl", "text": "raw", "note": reason}
