import csv
import math
import re

import pytest
from made_up_paper import CELLS, ONE, cell, write_paper
from synthetic import (
    bench_metrics,
    record_of,
    train_metrics,
    write_library,
    write_run,
    write_train,
    zero_shot_metrics,
)

from mol.base import UserError
from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.plan.spec import ZeroShotSpec
from mol.report.markup import csv_cell, markdown, tex
from mol.report.number import like, signed
from mol.report.tables import write_tables
from mol.store.ingest import build

HOSTILE = "x|y\n<script>alert(1)</script> [a](b) $\\input{/etc/passwd}$ `c` _d_ \u202e =1+1"


@pytest.mark.parametrize(
    "printed, value, text",
    [
        ("30.95", 812.3456, "812.35"),
        ("18,041", 5123.4, "5,123"),
        ("18,041", 99.6, "100"),
        ("84.7M", 84_722_688, "84.7M"),
        ("84.7M", 1_200_000, "1.2M"),
        ("0.61B", 607_227_904, "0.61B"),
        ("40K", 25.0, "25"),
        ("0.34×", 1.984, "1.98×"),
        ("+0.90", 1.0, "+1.00"),
        ("-2.98", 12.03, "+12.03"),
        ("53.3h", 0.0167, "0.0167h"),
        ("2.4×10^-7", 3.14159e-7, "3.14e-07"),
        ("64K-128K", 300.0, "300"),
        ("6.49", 0.0, "0.00"),
    ],
)
def test_our_figures_print_as_the_papers(printed, value, text):
    assert like(printed, value) == text


def test_differences_carry_their_sign():
    assert signed("30.95", -0.123) == "-0.12"
    assert signed("-2.98", 0.5) == "+0.50"
    assert signed("84.7M", 224.0) == "+224"


def test_markup_of_hostile_text_is_inert():
    assert "|" not in re.sub(r"\\\|", "", markdown(HOSTILE))
    assert "\n" not in markdown(HOSTILE) and "\u202e" not in markdown(HOSTILE)
    assert not re.search(r"(?<!\\)[<\[`$]", markdown(HOSTILE))
    assert r"\input" not in tex(HOSTILE) and not re.search(r"(?<!\\)[$_&#]", tex(HOSTILE))
    assert [csv_cell(text) for text in ("=1+1", "@a", "-x", "-2.98", "+0.01 (+0.3 nat)")] == [
        "'=1+1", "'@a", "'-x", "-2.98", "+0.01 (+0.3 nat)",
    ]  # fmt: skip


@pytest.fixture
def suite(tmp_path):
    """The made-up paper with smoke runs of its first table, three seeds of one row missing."""
    paper = write_paper(tmp_path / "paper")
    runs = tmp_path / "runs"
    for planned in plan("smoke", folder=paper):
        spec = planned.spec
        if spec.kind == "train" and spec.condition != "plain-web":
            data = {"source": HOSTILE if spec.condition == "fancy" else "made-up text"}
            record = record_of(spec, train_metrics(spec, math.log(40.0)), data=data)
            write_run(runs, record)
        elif spec.condition == "toy-prefill":
            write_run(runs, record_of(spec, bench_metrics(spec), notes=("ran on a | CPU",)))

    def tables():
        build(tmp_path / "mol.duckdb", runs, tmp_path / "records", paper)
        files = write_tables(tmp_path / "mol.duckdb", tmp_path / "tables")
        return {path.name: path.read_text() for path in files}

    tables.runs, tables.paper = runs, paper
    return tables


def grid(text):
    """Rows of the first Markdown table as lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_table_is_laid_out_as_printed_with_ours_beside(suite):
    files = suite()
    assert files.keys() == {
        *(f"table0{n}.{ending}" for n in (1, 2) for ending in ("md", "csv", "tex")),
        "text.md",
        "text.csv",
    }
    header, _, *rows = grid(files["table01.md"])
    assert header == ["", "Layers", "PPL reported", "PPL smoke", "PPL difference", "PPL verdict"]
    assert [row[0].split(r" \[")[0] for row in rows] == [
        "Plain",
        r"Fancy \| 2x",
        "Fancy web",
        "Plain web",
    ]
    assert rows[0][1:3] == ["1", "30.00 ± 0.05"]
    assert rows[0][3] == "40.00"
    assert rows[0][4] == ""  # another width and vocabulary: nothing to subtract
    assert rows[0][5] == "not run at paper scale"


def test_missing_runs_are_said(suite):
    text = suite()["table01.md"]
    assert "4 measured cells, 3 with a figure at scale smoke, 1 without a figure of ours" in text
    assert grid(text)[5][3:] == ["", "", "not run: cost unknown"]


def test_without_any_run_every_table_still_renders(tmp_path):
    paper = write_paper(tmp_path / "paper")
    build(tmp_path / "db", tmp_path / "runs", tmp_path / "records", paper)
    files = write_tables(tmp_path / "db", tmp_path / "tables")
    assert len(files) == 8
    text = (tmp_path / "tables" / "table01.md").read_text()
    assert "4 measured cells, 4 without a figure of ours. Verdicts: 4 not run." in text
    assert "smoke" not in text


def test_proxy_perplexities_differ_in_nats_and_are_labeled(suite):
    for planned in plan("proxy", folder=suite.paper):
        if planned.spec.condition == "plain":
            write_train(suite.runs, planned.spec, math.log(33.0))
    text = suite()["table01.md"]
    header, _, row, *_ = grid(text)
    assert header[3:6] == ["PPL smoke", "PPL proxy", "PPL difference"]
    assert row[3:6] == ["40.00", "33.00", r"+0.095 nat \[proxy\]"]
    assert "At scale proxy a difference of perplexities is given in nats" in text
    plain = list(csv.DictReader(suite()["table01.csv"].splitlines()))[1]
    assert plain["difference"] == ""
    assert float(plain["difference_nats"]) == pytest.approx(math.log(33 / 30), rel=1e-5)


def test_a_row_that_was_not_run_says_why(suite):
    spec = next(p.spec for p in plan("paper", folder=suite.paper) if p.spec.condition == "plain")
    reason = "out of memory (three times), and no larger GPU was at hand"
    record = record_of(spec, [], status="not run", reason=reason)
    write_run(suite.runs, record.model_copy(update={"metrics": ()}))
    for folder in (suite.runs / "smoke").iterdir():
        (folder / "record.json").unlink()
    text = suite()["table01.md"]
    assert grid(text)[2][-1] == "not run: out of memory, and no larger GPU was at hand"
    assert suite()["table02.md"].count("not run: needs H200") == 1


def zero_shot_cell(task):
    return cell(
        f"t1-{task}", "1", task, "acc", "25.0", condition="plain", metric="acc", unit="%",
        labels=f"task={task}", **ONE,
    )  # fmt: skip


def test_scoring_details_stand_once_below_and_reasons_in_their_row(suite):
    write_paper(suite.paper, [*CELLS, *map(zero_shot_cell, ("piqa", "mmlu", "truthfulqa_mc1"))])
    spec = ZeroShotSpec(
        scale="smoke", condition="plain", train_run="plain", tasks=("piqa", "mmlu"), seed=1
    )
    notes = (
        "piqa: task version 1, definition abc, 8 items",
        "items piqa: 1,838 rows, 445a",
        "truthfulqa_mc1: not run, items only from the hub (its name) or a given file",
    )
    write_run(suite.runs, record_of(spec, zero_shot_metrics(spec), notes=notes))
    text = suite()["table01.md"]
    assert text.count("definition abc") == text.count("445a") == 1
    assert (
        "- Scored at scale smoke with:\n  - piqa: task version 1, definition abc, 8 items" in text
    )
    (row,) = [row for row in grid(text) if row[0] == r"truthfulqa\_mc1"]
    assert row[-1] == "not run: items only from the hub or a given file"
    assert not [line for line in text.splitlines() if "not run," in line and line[:3] == "  -"]


def test_smoke_footnotes_say_once_why_nothing_is_subtracted(suite):
    text = suite()["table01.md"]
    assert text.count("No difference is given for figures at scale smoke") == 1


def test_footnotes_name_the_text_and_the_machine_of_each_row(suite):
    text = suite()["table01.md"]
    notes = [line for line in text.splitlines() if line.startswith(r"- \[")]
    assert notes[0] == r"- \[1\] scale smoke; text: made-up text; Made-up CPU."
    assert notes[1].startswith(r"- \[2\] scale smoke; text: x\|y \<script\>")
    rows = grid(text)[2:]
    assert [row[0].split(r" \[")[-1] for row in rows[:3]] == [r"1\]", r"2\]", r"1\]"]


def test_notes_of_a_run_are_shown(suite):
    write_paper(suite.paper, [c | {"labels": c["labels"].replace("128", "32")} for c in CELLS])
    assert r"ran on a \| CPU" in suite()["table02.md"]


def test_figures_at_other_settings_are_listed(suite):
    text = suite()["table02.md"]
    assert "Measured at settings that the paper does not print" in text
    assert re.search(
        r"\| smoke \| attention flash, length 32, mode eager, model fancy, path dense, "
        r"statistic median \| [\d.e+,]+ \| token/s",
        text,
    )


def test_csv_has_one_line_a_printed_cell(suite):
    files = suite()
    rows = list(csv.DictReader(files["table01.csv"].splitlines()))
    assert [row["cell_id"] for row in rows] == [
        cell["cell_id"] for cell in CELLS if cell["table"] == "1"
    ]
    plain = rows[1]
    assert (plain["reported"], plain["smoke"], plain["paper"]) == ("30.00 ± 0.05", "40.00", "")
    assert (plain["difference"], plain["difference_nats"]) == ("", "")
    assert plain["hardware"] == "Made-up CPU"


def test_latex_escapes_and_has_even_rows(suite):
    text = suite()["table01.tex"]
    assert r"Fancy \textbar{} 2x" in text and r"30.00 $\pm$ 0.05" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in body} == {5}


def test_text_numbers_stand_with_their_place(suite):
    rows = grid(suite()["text.md"])
    assert rows[2][:4] == ["Section 1", r"Plain less fancy \[1\]", "3.00", "0.00"]
    assert rows[3][:3] == ["Section 1", "Fancy web crosses", "100"]


def test_a_reproduced_cell_shows_its_paper_scale_figure(suite):
    for planned in plan("paper", folder=suite.paper):
        if planned.spec.condition == "plain":
            write_train(suite.runs, planned.spec, math.log(30.01))
    header, _, row, *_ = grid(suite()["table01.md"])
    assert header[2:6] == ["PPL reported", "PPL smoke", "PPL reproduced", "PPL difference"]
    assert row[3:] == ["40.00", "30.01", "+0.01 (+0.000 nat)", "reproduced"]


def test_no_database_says_the_way_out(tmp_path):
    with pytest.raises(UserError, match="mol store build"):
        write_tables(tmp_path / "absent.duckdb", tmp_path)


def test_all_tables_of_the_paper_render_with_half_of_the_records(tmp_path):
    runs = tmp_path / "runs"
    write_library(runs)
    for folder in sorted((runs / "smoke").iterdir())[::2]:
        (folder / "record.json").unlink()
    build(tmp_path / "db", runs, tmp_path / "records", PAPER)
    files = write_tables(tmp_path / "db", tmp_path / "tables")
    names = {path.name for path in files}
    assert {f"table{n:02d}.{e}" for n in range(1, 15) for e in ("md", "csv", "tex")} <= names
    states = [path.read_text() for path in files if path.name.endswith(".md")]
    assert sum("without a figure of ours" in text for text in states) > 5
    assert sum("at scale smoke" in text for text in states) > 5
    ours = "".join(states)
    assert "not run at paper scale" in ours and "PPL reproduced" not in ours
