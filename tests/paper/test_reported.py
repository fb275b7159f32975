"""The loader refuses what is malformed, and every name a cell uses is defined."""

import csv
import io

import pytest

from mol.base import UserError
from mol.paper.cell import METRICS, Cell
from mol.paper.reported import load_paper

PLAN = """
seeds = [1, 2]
[experiments.X1]
title = "made up"
conditions = ["small", "large"]
benches = ["speed"]
[benches.speed]
program = "prefill"
"""
CONDITIONS = "[conditions.small]\n[conditions.large]\n"
ROW = dict.fromkeys(Cell.model_fields, "") | {
    "cell_id": "t01.small",
    "table": "1",
    "row": "small",
    "column": "PPL",
    "printed": "12.5",
    "spread": "0.3",
    "unit": "ppl/token",
    "kind": "measured",
    "n_seeds": "2",
    "place": "Table 1",
    "experiment": "X1",
    "condition": "small",
    "seeds": "1;2",
    "metric": "ppl",
    "labels": "split=test",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiments.toml").write_text(PLAN)
    (tmp_path / "conditions.toml").write_text(CONDITIONS)
    return tmp_path


def write(folder, *rows, columns=tuple(Cell.model_fields)):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    (folder / "reported.csv").write_text(text.getvalue())
    return folder


def test_reads_another_papers_folder(folder):
    paper = load_paper(
        write(folder, ROW, {**ROW, "cell_id": "t01.b", "op": "diff", "versus": "large"})
    )
    first, second = paper.cells
    assert first.number.low == pytest.approx(12.45) and first.deviation.value == 0.3
    assert first.seeds == (1, 2) and first.labels == {"split": "test"}
    assert second.versus == "large" and second.versus_labels == {}
    assert paper.cell("t01.b") == second
    with pytest.raises(UserError, match="no cell 't99'"):
        paper.cell("t99")


def test_another_side_of_a_benchmark_replaces_labels(folder):
    change = {
        "condition": "speed",
        "metric": "prefill_tokens_per_s",
        "labels": "length=4096;model=large;cache=true",
        "unit": "ratio",
        "op": "ratio",
        "versus": "model=small",
    }
    (cell,) = load_paper(write(folder, ROW | change)).cells
    assert cell.versus_labels == {"length": 4096, "model": "small", "cache": True}


@pytest.mark.parametrize(
    ("change", "column", "message"),
    [
        ({"printed": "12.5.1"}, "printed", "not a printed number"),
        ({"printed": ""}, "printed", "at least 1 character"),
        ({"spread": "much"}, "spread", "not a printed number"),
        ({"unit": "furlong"}, "unit", "Input should be"),
        ({"kind": "guessed"}, "kind", "Input should be"),
        ({"n_seeds": "two"}, "n_seeds", "valid integer"),
        ({"n_seeds": "0"}, "n_seeds", "greater than 0"),
        ({"cell_id": "No Good"}, "cell_id", "match pattern"),
        ({"table": "one"}, "table", "match pattern"),
        ({"place": ""}, "place", "at least 1 character"),
        ({"seeds": "1;x"}, "seeds", "valid integer"),
        ({"seeds": "1;7"}, "seeds", "seeds of experiments.toml"),
        ({"metric": "perplexity"}, "metric", "is not a metric"),
        ({"labels": "split"}, "labels", "not key=value"),
        ({"labels": "a=1;a=2"}, "labels", "occurs twice"),
        ({"op": "sum", "versus": "large"}, "op", "Input should be"),
        ({"op": "diff"}, "whole line", "op and versus come together"),
        ({"op": "diff", "versus": "huge"}, "versus", "conditions.toml"),
        ({"experiment": "X9"}, "experiment", "experiments.toml"),
        ({"condition": "huge"}, "condition", "conditions.toml"),
        ({"condition": ""}, "whole line", "a metric needs a condition"),
        ({"unit": "text"}, "whole line", "cannot have the unit text"),
    ],
)
def test_names_line_and_column_at_fault(folder, change, column, message):
    write(folder, ROW, ROW | {"cell_id": "t01.other"} | change)
    with pytest.raises(UserError, match=message) as caught:
        load_paper(folder)
    assert f"reported.csv:3: column '{column}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_repeated_cell_names_both_lines(folder):
    with pytest.raises(UserError, match=r"reported.csv:3: column 'cell_id'.*line 2"):
        load_paper(write(folder, ROW, ROW))


def test_a_condition_of_another_experiment_is_refused(folder):
    (folder / "experiments.toml").write_text(PLAN + '[experiments.X2]\nconditions = ["large"]\n')
    with pytest.raises(UserError, match="'small' is not in experiment X2"):
        load_paper(write(folder, ROW | {"experiment": "X2"}))


def test_unknown_and_missing_columns(folder):
    columns = list(Cell.model_fields)
    with pytest.raises(UserError, match="reported.csv:1: column 'extra' is unknown"):
        load_paper(write(folder, ROW, columns=[*columns, "extra"]))
    with pytest.raises(UserError, match="reported.csv:1: column 'note' is missing"):
        load_paper(write(folder, ROW, columns=columns[:-1]))


def test_a_line_with_too_many_or_too_few_fields(folder):
    path = write(folder, ROW) / "reported.csv"
    whole = path.read_text()
    for line in ("t01.b,1\n", "," * 40 + "\n"):
        path.write_text(whole + line)
        with pytest.raises(UserError, match="reported.csv:3: not 19 fields"):
            load_paper(folder)


def test_missing_and_unreadable_files(folder):
    with pytest.raises(UserError, match="reported.csv"):
        load_paper(folder)
    (folder / "reported.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="reported.csv"):
        load_paper(folder)
    write(folder, ROW)
    (folder / "experiments.toml").write_text("seeds = [")
    with pytest.raises(UserError, match="experiments.toml"):
        load_paper(folder)


def test_the_paper_names_a_run_and_a_metric_for_what_can_be_produced():
    paper = load_paper()
    by_kind = {
        kind: [cell for cell in paper.cells if cell.kind == kind]
        for kind in ("setting", "count", "derived", "measured")
    }
    assert sum(bool(cell.metric) for cell in by_kind["measured"]) >= 290
    assert all(cell.metric in METRICS for cell in paper.cells if cell.metric)
    for cell in by_kind["measured"] + by_kind["derived"] + by_kind["count"]:
        assert cell.metric or cell.note, f"{cell.cell_id}: neither a metric nor why there is none"
    for cell in by_kind["measured"]:
        if cell.table != "text" and cell.row not in ("caption", "note"):
            assert cell.metric and cell.condition, cell.cell_id


def test_one_seed_of_a_table_cell_is_one_seed():
    cells = [c for c in load_paper().cells if c.table == "11" and c.row in ("42", "137", "256")]
    assert len(cells) == 18
    assert all(cell.seeds == (int(cell.row),) for cell in cells)


def test_printed_units_against_record_units():
    paper = load_paper()
    assert paper.cell("t06.winogrande.mol-2p08b").per_metric_unit == 100
    assert paper.cell("t05.mol.wall").per_metric_unit == 1 / 3600
    assert paper.cell("t12.1024.growth").per_metric_unit == 1
    assert paper.cell("t02.deltanet-1p3of15.ppl").per_metric_unit == 1


@pytest.mark.parametrize(
    "change, what",
    [
        ({"unit": "ms"}, "unit 'ms' does not go with ppl, which is in ppl/token"),
        ({"metric": "acc"}, "unit 'ppl/token' does not go with acc, which is in % or pt or frac"),
        ({"op": "ratio", "versus": "large"}, "does not go with ratio of ppl, which is in ratio"),
        ({"op": "crossover", "versus": "large", "unit": "h"}, "crossover of ppl, which is in step"),
    ],
)
def test_a_unit_that_its_metric_does_not_have_is_refused(folder, change, what):
    with pytest.raises(UserError, match=what):
        load_paper(write(folder, {**ROW, **change}))
