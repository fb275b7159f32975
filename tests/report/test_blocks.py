"""Further texts, zero-shot scores with their flags, and runs to come, as the page shows them."""

import html
import re

import pytest
from pages import make
from synthetic import H200, record_of, train_metrics, write_run

from mol.plan.build import plan
from mol.report.page import Extras
from mol.store.record import Metric

VERSIONS = {"truthfulqa_mc2": "2.0"}


@pytest.fixture
def page(tmp_path):
    """Write records of proxy runs, then read the rows of a table of the page as text."""

    class Page:
        def __init__(self):
            self.specs = {(p.spec.kind, p.spec.condition): p.spec for p in reversed(plan("proxy"))}

        def write(self, kind, condition, metrics, **more):
            record = record_of(self.specs[kind, condition], metrics, hardware=H200, **more)
            write_run(tmp_path / "runs", record)

        def render(self):
            self.html = make(tmp_path, extras=Extras(task_versions=VERSIONS)).read_text("utf-8")

        def rows(self, table):
            (body,) = re.findall(rf'id="{table}".*?<tbody>(.*?)</tbody>', self.html, re.DOTALL)
            return [
                html.unescape(" ".join(re.sub(r"<[^>]*>", " ", row).split()))
                for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL)
            ]

    return Page()


def text_metric(name, value, unit, stderr=None):
    labels = {"text": "wikitext103-test", "context": 255, "pad": "masked"}
    return Metric(name=name, value=value, unit=unit, n=202_854, stderr=stderr, labels=labels)


def test_a_further_text_stands_beside_the_held_out_ones_and_in_no_cell(page):
    spec = page.specs["train", "mol-top3"]
    further = [
        text_metric("text_nll", 4.4444, "nat/token", 0.0111),
        text_metric("text_bits_per_byte", 1.5151, "bit/byte"),
    ]
    own = {"source": "own text in place of wikitext103: a.txt"}
    page.write("train", "mol-top3", train_metrics(spec, 3.3) + further, data=own)
    page.write("train", "mol-all-active", train_metrics(page.specs["train", "mol-all-active"], 3.2))
    page.render()
    found = page.rows("E05-texts")
    assert [row.split(" proxy ")[0] for row in found] == [
        "mol-top3, seed 42 validation held out of the training text",
        "mol-top3, seed 42 test held out of the training text",
        "mol-top3, seed 42 wikitext103-test another text",
    ]
    assert found[2].endswith("4.4444 ± 0.0111 1.5151 202,854")
    shown = [row for row in page.rows("E05-table-1") if "27.11" in row]
    assert shown and all("27.11 proxy, own text" in row for row in shown)
    # exp(4.4444), the perplexity that no printed number may be held against
    assert not re.search(r"\b85\.1", " ".join(page.rows("E05-table-1")))
    assert "E10-texts" not in page.html
    left = page.rows("E05-not-run")
    assert any(re.match(r"mol-top3 proxy 137 training not run \d", row) for row in left)
    assert any(re.match(r"ct-moe proxy 42 training not run not measured", row) for row in left)


def test_scores_of_unlike_tests_carry_a_flag_each(page):
    def score(task="winogrande", **labels):
        return Metric(name="acc", value=0.5, unit="fraction", n=100, stderr=0.05,
                      labels={"task": task} | labels)  # fmt: skip

    of = {"harness": "lm_eval 0.4.13", "task_version": "1.0", "definition": "d1", "shots": 0}
    page.write("zeroshot", "fineweb-dense-98m", [
        score(**of), score("piqa", **of), score("truthfulqa_mc2", **of | {"task_version": "3.0"}),
    ])  # fmt: skip
    page.write("zeroshot", "fineweb-1p3of15", [
        score(**of | {"harness": "lm_eval 0.4.7", "definition": "d2"}), score("piqa", **of),
        score("truthfulqa_mc2 (other items)", **of | {"items": "abc"}),
    ])  # fmt: skip
    page.render()
    rows = page.rows("E12-scores")
    of_task = {name: [row for row in rows if row.startswith(name)] for name in VERSIONS}
    differ = "rows of this task differ in definition, harness and are not compared"
    assert [differ in row for row in rows if row.startswith("winogrande")] == [True, True]
    assert ["flag" in row for row in rows if row.startswith("piqa")] == [False, False]
    assert all("differ in task, items, task version" in r for r in of_task["truthfulqa_mc2"])
    assert "the paper's harness has version 2.0 of this task" in of_task["truthfulqa_mc2"][0]
    compared = page.rows("E12-comparisons")
    (unlike,) = (row for row in compared if row.startswith("winogrande"))
    assert "not compared, unlike definition (d2 and d1)" in unlike and unlike.count("–") >= 2
    (alike,) = (row for row in compared if row.startswith("piqa"))
    assert "fineweb-1p3of15 less fineweb-dense-98m , seed 42" in alike and "+0.00 ± 7.07" in alike
    assert len(compared) == 2  # other items are another task
