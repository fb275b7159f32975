"""How runs trained, further texts, zero-shot scores with their flags, dispatch paths, and runs to
come, as the page shows them."""

import html
import re

import pytest
from pages import make
from synthetic import H200, bench_metrics, record_of, train_metrics, write_run

from mol.plan.build import plan
from mol.report.page import Extras
from mol.store.record import Metric

VERSIONS = {"truthfulqa_mc2": "2.0"}
STEPS = {"mol-top3": 50_000}


@pytest.fixture
def page(tmp_path):
    """Write records of proxy runs, then read the rows of a table of the page as text."""

    class Page:
        def __init__(self):
            self.specs, self.smoke = (
                {(p.spec.kind, p.spec.condition): p.spec for p in reversed(plan(scale))}
                for scale in ("proxy", "smoke")
            )

        def write(self, kind, condition, metrics, specs=None, **more):
            spec = (specs or self.specs)[kind, condition]
            record = record_of(spec, metrics, hardware=H200, **more)
            write_run(tmp_path / "runs", record)

        def render(self):
            self.html = make(
                tmp_path, extras=Extras(task_versions=VERSIONS, steps=STEPS)
            ).read_text("utf-8")

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


def test_a_section_says_how_its_runs_trained_how_fast_and_for_how_long(page):
    own = {"source": "own text in place of wikitext103: a.txt"}
    for name in ("mol-top3", "mol-all-active"):
        metrics = train_metrics(page.specs["train", name], 3.3)
        page.write("train", name, metrics, data=own, wall_s=1800.0)
    page.render()
    text = "own text in place of wikitext103"
    assert (
        f"Ours at proxy scale: 5,000 of the paper&#39;s 50,000 steps, seed 42, {text}." in page.html
    )
    assert f"Ours at proxy scale: 5,000 steps, seed 42, {text}." in page.html
    (row,) = (row for row in page.rows("E05-runs") if row.startswith("mol-top3"))
    assert row.endswith("proxy 42 complete 1 × NVIDIA H200 5,000 5,000 0.5 1,800")


def test_paths_of_every_run_stand_where_the_claim_about_them_is(page):
    def of_path(name, value, unit, stderr, **labels):
        return Metric(name=name, value=value, unit=unit, n=12_982, stderr=stderr, labels=labels)

    found = [
        of_path("path_ppl", 135.957, "ppl/token", 10.2, path="loop"),
        of_path("path_ppl", 135.895, "ppl/token", 10.2, path="batched"),
        of_path("path_ppl_change", -0.000456, "fraction", 0.000868, path="batched", over="loop"),
    ]
    run = "deltanet-1p3of15, seed 42"
    for scale, specs in (("smoke", page.smoke), ("proxy", page.specs)):  # smoke's give way
        own = train_metrics(specs["train", "deltanet-1p3of15"], 4.6)
        page.write("train", "deltanet-1p3of15", own + found, specs)
        page.render()
        assert [row.split(" ")[4] for row in page.rows("E08-paths")] == [scale, scale]
    assert page.rows("E08-paths") == [
        f"{run} loop proxy 135.96 – 12,982",
        f"{run} batched proxy 135.90 -0.046 ± 0.087 12,982",
    ]
    caption = page.html[page.html.index('id="E08-paths"') :]
    printed = '<a href="#cell-txt.s5p6.ppl-shift">-0.11%</a>'
    assert printed in caption[: caption.index("</caption>")]
    assert 'id="E06-paths"' not in page.html


def test_a_figure_without_a_run_is_shown_once_and_only_where_no_scale_has_one(page):
    bench = ("bench", "attention")
    page.specs[bench] = next(
        p.spec for p in plan("paper") if (p.spec.kind, p.spec.condition) == bench
    )
    page.write(*bench, bench_metrics(page.specs[bench]))
    spec = page.specs["train", "mol-top3"]
    page.write("train", "mol-top3", train_metrics(spec, 3.3))
    page.render()
    shown = re.findall(r'<figure id="fig-(\w+)-(\w+)"', page.html)
    by_id = {name: [scale for other, scale in shown if other == name] for name, _ in shown}
    assert by_id["table02"] == ["proxy"] and by_id["table10"] == ["paper"]
    assert all(len(scales) == 1 for scales in by_id.values()) and len(by_id) == 7
