import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import duckdb
import pytest
from made_up_paper import write_paper
from pages import HOSTILE, hostile_runs, make, page_of, setting
from synthetic import write_library

from mol.cli import main
from mol.paper.reported import load_paper
from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.figures import write_figures
from mol.report.page import Extras, render
from mol.report.source import Source
from mol.store.ingest import build

VOID = {"meta", "link", "input", "img", "br", "hr", "path", "use", "rect", "stop"}


class Page(HTMLParser):
    """Elements with their attributes, and the links, ids and visible text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.unclosed: list[str] = []
        self.feed(html)
        self.unclosed += self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        while self._open and (last := self._open.pop()) != tag:
            self.unclosed.append(last)

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, key: str) -> list[str]:
        return [attrs[key] for _, attrs in self.elements if key in attrs]


@pytest.fixture(scope="module")
def parsed(both_page):
    return Page(both_page.read_text("utf-8"))


def test_page_needs_no_network_and_is_small(both_page, parsed):
    assert both_page.stat().st_size < 4_000_000
    assert not parsed.all("src")
    for tag, attrs in parsed.elements:
        for key in ("href", "xlink:href", "action", "data", "poster"):
            assert attrs.get(key, "#").startswith(("#", "data:")), (tag, attrs)
    html = both_page.read_text("utf-8")
    assert "@import" not in html and not re.search(r"url\((?!#)", html)


def test_ids_are_unique_and_links_resolve(parsed):
    ids = parsed.all("id")
    assert len(ids) == len(set(ids))
    targets = [
        link[1:] for link in parsed.all("href") + parsed.all("xlink:href") if link[:1] == "#"
    ]
    assert len(targets) > 500
    assert not set(targets) - set(ids)
    assert not parsed.unclosed


def test_every_printed_cell_has_a_row(parsed):
    rows = {name.removeprefix("cell-") for name in parsed.all("id") if name.startswith("cell-")}
    assert rows == {cell.cell_id for cell in load_paper().cells}


def test_a_unit_that_is_printed_is_not_said_twice(both_page):
    html = both_page.read_text("utf-8")
    assert '"Reported">53.3h</td>' in html and '"Reported">15.03 <small>ppl/token</small>' in html


def test_reproduced_figures_lead_to_records_with_everything(both_page, parsed):
    html = both_page.read_text("utf-8")
    records = dict(re.findall(r'aria-label="Record of ([^"]+)" data-lines="([\d ]+)"', html))
    assert len(records) == len(plan("smoke")) + len(plan("paper"))
    shared = html[html.index('<pre id="lines"') :]
    lines = "".join(Page(shared[: shared.index("</pre>") + 6]).words).split("\n")
    assert len(lines) == len(set(lines))
    run = next(p for p in plan("paper") if p.spec.condition == "mol-top3").run_id
    assert f'id="run-{run}"' in html
    record = json.loads("\n".join(lines[int(place)] for place in records[run].split()))
    stored = json.loads((both_page.parent / "runs/paper" / run / "record.json").read_text())
    assert record["spec"] == stored["spec"]
    assert record["code_sha256"] == stored["provenance"]["code_sha256"]
    assert len(record["metrics"]) == len(stored["metrics"])
    assert record["metrics"][0]["value"] in {metric["value"] for metric in stored["metrics"]}
    cell = html[html.index('id="cell-t02.dense-full.ppl"') :]
    assert f'href="#run-{run}"' in cell[: cell.index("</tr>")]


def test_headline_counts_measured_cells_by_verdict(both_page, parsed):
    with duckdb.connect(str(both_page.parent / "mol.duckdb"), read_only=True) as database:
        (reproduced,) = database.execute(
            "SELECT count(*) FROM verdicts JOIN cells USING (cell_id) "
            "WHERE kind = 'measured' AND scale = 'paper' AND verdict = 'reproduced'"
        ).fetchone()
    measured = sum(cell.kind == "measured" for cell in load_paper().cells)
    assert reproduced > 0
    assert f"{reproduced} of {measured} measured results" in parsed.text


def test_smoke_figures_are_labeled_and_judge_nothing(tmp_path):
    write_library(tmp_path / "runs", "smoke")
    html = make(tmp_path).read_text("utf-8")
    text = Page(html).text
    assert "0 of " in text and "not run at paper scale" in text
    row = html[html.index('id="cell-t02.dense-full.ppl"') :]
    row = row[: row.index("</tr>")]
    assert '<small class="scale">smoke</small>' in row and "not run at paper scale" in row


def test_sections_show_settings_counts_and_checks(both_page, parsed):
    for name in load_paper().experiments:
        assert name in parsed.all("id")
    html = both_page.read_text("utf-8")
    e05 = html[html.index('<section id="E05"') :]
    assert "3e-4" in e05[: e05.index("</section>")]
    e06 = html[html.index('<section id="E06"') :]
    assert "3e-4" not in e06[: e06.index("</section>")]
    assert {"counts", "counts-grid", "checks", "checks-contradicted", "checks-flags"} <= set(
        parsed.all("id")
    )
    assert "84,722,688" in parsed.text


def test_the_verdict_comes_first_and_contradictions_with_their_reading(both_page, parsed):
    html = both_page.read_text("utf-8")
    assert html.index('id="verdict"') < html.index("<nav") < html.index('<section id="E01"')
    wrong = html[html.index('id="checks-contradicted"') :]
    wrong = wrong[: wrong.index("</table>")]
    with duckdb.connect(str(both_page.parent / "mol.duckdb"), read_only=True) as database:
        (count,) = database.execute(
            "SELECT count(*) FROM checks WHERE verdict = 'contradicted'"
        ).fetchone()
    assert wrong.count("<tr role") == count + 1 and f"({count})" in wrong
    assert "no row of it gives 9.7" in wrong


def test_a_claim_stands_once_a_scale_and_says_what_decides_it(tmp_path):
    write_library(tmp_path / "runs", "smoke")
    html = make(tmp_path).read_text("utf-8")
    assert 'id="claim-cosmo-ranking-smoke"' in html and "claim-cosmo-ranking-paper" not in html
    row = html[html.index('id="claim-cosmo-ranking-smoke"') :]
    assert "At paper scale it takes 5 training runs, 74.7B tokens." in row[: row.index("</tr>")]


def test_a_number_that_was_not_run_says_what_it_needs(empty_page):
    html = empty_page.read_text("utf-8")
    row = html[html.index('data-table="12"') :]
    assert "needs RTX 3090" in row[: row.index("</tr>")]


def test_claims_stand_with_their_experiment_and_scale(both_page, parsed):
    with duckdb.connect(str(both_page.parent / "mol.duckdb"), read_only=True) as database:
        rows = database.execute("SELECT claim_id, scale, outcome FROM claim_results").fetchall()
    assert rows
    assert {f"claim-{name}-{scale}" for name, scale, _ in rows} <= set(parsed.all("id"))
    held = sum((scale, outcome) == ("paper", "holds") for _, scale, outcome in rows)
    assert f"Claims at paper scale: ✓ {held} holds" in parsed.text


def test_protocols_stand_with_their_outcome_and_run(two_scales, tmp_path):
    spec = next(p.spec for p in plan("paper") if p.spec.condition == "dense-softmax-85m")
    row = {
        "run_id": spec.run_id, "scale": "paper", "condition": spec.condition, "seed": spec.seed,
        "name": "ppl", "value": 30.2, "unit": "ppl/token", "split": "validation",
        "pad": "pad_counted", "layout": "chunked", "context": 255, "stride": 255,
        "eos": "as_prepared", "text": "prepared", "note": "", "outcome": "lands on 30.26 (Table 2)",
        "compared": [
            {"cell_id": "t02.dense-85m.ppl", "printed": "30.26", "difference_nats": -0.002,
             "half_width": 0.01, "lands": True}
        ],
    }  # fmt: skip
    path = page_of(two_scales / "mol.duckdb", tmp_path, PAPER, Extras(protocols=[row]))
    page = Page(path.read_text("utf-8"))
    assert "1 compared with printed numbers, 1 land on one." in page.text
    assert "validation, PAD counted, chunked, context 255, stride 255" in page.text
    assert "lands on 30.26 (Table 2) -0.002 ± 0.01 nat of 30.26" in page.text
    assert f"#run-{spec.run_id}" in page.all("href") and not page.unclosed


def test_same_database_gives_the_same_page(both_page):
    source = Source(both_page.parent / "mol.duckdb")
    figures = write_figures(source, both_page.parent / "again")
    assert render(source, figures, Extras()) == render(source, figures, Extras())


def test_empty_database_says_so(empty_page):
    page = Page(empty_page.read_text("utf-8"))
    assert "No run is recorded" in page.text
    assert "No run of this experiment is recorded." in page.text
    assert "15.03" in page.text and not page.unclosed


def test_database_without_tables_says_so(tmp_path):
    path = tmp_path / "mol.duckdb"
    duckdb.connect(str(path)).close()
    source = Source(path)
    page = Page(render(source, write_figures(source, tmp_path), Extras()))
    assert "The database holds no number of the paper" in page.text and not page.unclosed


def test_half_of_the_records_missing(tmp_path):
    write_library(tmp_path / "runs", "smoke")
    for folder in sorted((tmp_path / "runs/smoke").iterdir())[::2]:
        shutil.rmtree(folder)
    broken = sorted((tmp_path / "runs/smoke").iterdir())[0] / "record.json"
    broken.write_text("{")
    page = Page(make(tmp_path).read_text("utf-8"))
    assert "1 file could not be used" in page.text and "not a readable record" in page.text
    assert "Missing at smoke scale" in page.text
    ids = set(page.all("id"))
    assert all(link[1:] in ids for link in page.all("href") if link[:1] == "#")


def test_records_are_text_and_nothing_else(tmp_path):
    hostile_runs(tmp_path)
    extras = Extras(counts=[{HOSTILE: HOSTILE}], settings=[setting(HOSTILE)])
    path = make(tmp_path, extras=extras)
    page = Page(path.read_text("utf-8"))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [attrs for _, attrs in page.elements if any(key.startswith("on") for key in attrs)]
    assert page.text.count("onerror=alert(1)") >= 5
    assert not page.unclosed


def test_another_paper_renders_with_the_same_code(tmp_path):
    paper = write_paper(tmp_path / "paper")
    page = Page(make(tmp_path, paper).read_text("utf-8"))
    assert {"X1", "X2"} <= set(page.all("id"))


def test_report_command_lists_what_it_wrote(tmp_path, capsys):
    build(tmp_path / "mol.duckdb", tmp_path / "none", tmp_path / "none", PAPER)
    options = ["--out", str(tmp_path / "out"), "--figures", str(tmp_path / "figures")]
    database = ["--db", str(tmp_path / "mol.duckdb")]
    assert main(["report", "--json", *database, *options]) == 0
    files = json.loads(capsys.readouterr().out)
    assert len(files) == len(set(files)) and all(Path(file).stat().st_size for file in files)
    written = {
        p for part in ("out", "figures") for p in (tmp_path / part).rglob("*") if p.is_file()
    }
    assert {Path(file) for file in files} == written
    assert str(tmp_path / "out/index.html") in files
    assert main(["report", "--db", str(tmp_path / "absent.duckdb"), *options]) == 2
    assert "absent.duckdb" in capsys.readouterr().err


def test_the_report_of_another_paper_has_nothing_of_this_one(tmp_path, capsys):
    paper = write_paper(tmp_path / "paper")
    title = 'title = "A paper that does not exist"\n'
    experiments = paper / "experiments.toml"
    experiments.write_text(title + experiments.read_text())
    where = ["--paper", str(paper), "--db", str(tmp_path / "db")]
    nowhere = ["--runs", str(tmp_path / "none"), "--records", str(tmp_path / "none")]
    assert main(["store", "build", *where, *nowhere]) == 0
    out = ["--out", str(tmp_path / "out"), "--figures", str(tmp_path / "figures")]
    assert main(["report", *where, *out]) == 0
    html = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert "<title>Reported and reproduced: A paper that does not exist</title>" in html
    assert "X1" in html and "E01" not in html and "Mixture of Layers" not in html
    (paper / "settings.toml").write_text(
        '[[settings]]\nexperiments = ["X9"]\nsetting = "lr"\nvalue = 1\n'
        'status = "stated"\nsource = "4"\n'
    )
    capsys.readouterr()
    assert main(["report", *where, *out]) == 2
    assert "row 1 (lr): experiments: 'X9' is not defined" in capsys.readouterr().err
