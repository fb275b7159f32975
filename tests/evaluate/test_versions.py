"""The paper's harness version against the installed one."""

import pytest
from written_items import written_tables

from mol.data.tokenizers import train_bpe
from mol.data.wheel import wheel_folder
from mol.evaluate import versions
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.sanity import random_model
from mol.evaluate.tasks import SETS, STOCK

WHEEL = wheel_folder() / versions.PAPERS_WHEEL.file


def write(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_yaml", ".yaml").replace("_py", ".py")).write_text(text, "utf-8")
    return folder / "task.yaml"


def test_what_counts_as_a_change(tmp_path):
    shared = "dataset_path: a\ndoc_to_text: '{{q}}'\nmetadata: {version: 1.0}\n"
    task = "include: base.yaml\ntask: t\nprocess_results: !function utils.score\n"
    code = "def score(doc, results):\n    return {'acc': 1}  # {}\n"
    old = write(tmp_path / "old", base_yaml=shared, task_yaml=task, utils_py=code)
    moved = shared.replace("dataset_path: a", "dataset_path: b").replace("1.0", "2.0")
    same = write(tmp_path / "same", base_yaml=moved, task_yaml=task, utils_py="\n# new\n" + code)
    assert versions.changed_keys(versions.definition(old), versions.definition(same)) == ()
    other = code.replace("1}", "0}")
    prompt = shared.replace("{{q}}", "Q: {{q}}")
    new = write(tmp_path / "new", base_yaml=prompt, task_yaml=task, utils_py=other)
    found = versions.changed_keys(versions.definition(old), versions.definition(new))
    assert found == ("doc_to_text", "score()")


def test_every_task_has_its_definition():
    names = [name for name in SETS if name != "mmlu"] + ["mmlu_anatomy"]
    for name in names:
        found = versions.definition(versions.yaml_of(STOCK, name))
        assert found["task"] == name and found["output_type"] == "multiple_choice"


@pytest.mark.skipif(not WHEEL.is_file(), reason=f"no {WHEEL} (2.5 MB; `mol zeroshot versions`)")
def test_mc2_alone_moved_and_only_where_right_options_do_not_come_first():
    tokenizer = train_bpe(["the lamp river engine Question: A B C"] * 50, 300)
    model = HarnessModel(random_model(300, 1, 4096), tokenizer, prefix_token=1)
    tables: dict = {}
    for (name, split), table in written_tables(12).items():
        tables.setdefault(name, {})[split] = table
    ours = {"truthfulqa_mc1": (), "truthfulqa_mc2": ("process_results_mc2()",), "arc_easy": ()}
    found = {change.task: change for change in versions.compare(model, list(ours), tables, 12)}
    assert {name: change.differs for name, change in found.items()} == ours
    assert all(change.unlike_requests == 0 for change in found.values())
    for name in ("truthfulqa_mc1", "arc_easy"):
        assert all(a == pytest.approx(b) for a, b in found[name].score.values())
    assert (found["truthfulqa_mc2"].theirs, found["truthfulqa_mc2"].ours) == ("2.0", "3.0")
    before, after = found["truthfulqa_mc2"].score["acc"]
    assert before < after - 0.01  # the old metric stops at the first wrong option

    rows = tables["truthfulqa"]["validation"].to_pylist()
    for row in rows:
        labels = row["mc2_targets"]["labels"]
        row["mc2_targets"]["labels"] = sorted(labels, reverse=True)
    table = type(tables["truthfulqa"]["validation"]).from_pylist(rows)
    (same,) = versions.compare(model, ["truthfulqa_mc2"], {"truthfulqa": {"validation": table}}, 12)
    assert same.score["acc"][0] == pytest.approx(same.score["acc"][1])
    mixed = versions.shuffled_targets(table).to_pylist()
    assert mixed != rows and [sorted(r["mc2_targets"]["choices"]) for r in mixed] == [
        sorted(r["mc2_targets"]["choices"]) for r in rows
    ]
