"""The scores of a zero-shot run by item: the file `samples.parquet` beside its record."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mol.base import UserError

SAMPLES = "samples.parquet"
OTHER = "(other items)"  # ends the name of a task on items that are not the paper's
ITEMS = pa.schema(
    [
        ("task", pa.string()), ("subtask", pa.string()), ("doc_id", pa.int64()),
        ("doc_hash", pa.string()), ("acc", pa.float64()), ("acc_norm", pa.float64()),
    ]
)  # fmt: skip


def read_samples(path: Path) -> pa.Table:
    """One row an item. Raises UserError when the file is broken or scores an item twice."""
    again = "delete the folder to rerun"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(columns=ITEMS.names).select(ITEMS.names).cast(ITEMS)
    except (OSError, KeyError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"not readable as scores of items ({reason}); {again}") from None
    keys = ["task", "subtask", "doc_id"]
    if any(table[name].null_count for name in (*keys, "doc_hash")):
        raise UserError(f"an item has no name; {again}")
    if len(table.group_by(keys).aggregate([])) != len(table):
        raise UserError(f"scores an item twice; {again}")
    return table
