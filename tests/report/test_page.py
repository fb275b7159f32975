import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import browser
import duckdb
import pytest
from made_up_paper import write_paper
from synthetic import CPU, record_of, train_metrics, write_library, write_run

from mol.cli import main
from mol.paper.reported import load_paper
from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.figures import write_figures
from mol.report.page import Extras, render
from mol.report.source import Source
from mol.store.ingest import build

HOSTILE = (
    "</pre></details><script>document.title='taken'</script><img src=x onerror=alert(1)> \" ' &"
)
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


def setting(value: str) -> dict:
    return {
        "experiments": ("E01", "E05"), "conditions": (), "setting": "lr", "value": value,
        "status": "stated", "source": "4.2",
    }  # fmt: skip


def make(folder: Path, paper: Path = PAPER, extras: Extras | None = None) -> Path:
    """Database, figures and page from the runs below `folder`."""
    build(folder / "mol.duckdb", folder / "runs", folder / "no-records", paper)
    return page_of(folder / "mol.duckdb", folder, paper, extras or Extras())


def page_of(database: Path, folder: Path, paper: Path, extras: Extras) -> Path:
    source = Source(database)
    figures = write_figures(source, folder / "figures", paper)
    page = folder / "index.html"
    page.write_text(render(source, figures, extras), "utf-8")
    return page


@pytest.fixture(scope="module")
def both(two_scales):
    """The page of every planned run at smoke and at paper scale."""
    counts = [{"place": "Table 2", "computed": 84722688, "printed": "84.7M", "match": True}]
    settings = [setting("3e-4")]
    extras = Extras(counts=counts, settings=settings)
    return page_of(two_scales / "mol.duckdb", two_scales, PAPER, extras)


@pytest.fixture(scope="module")
def parsed(both):
    return Page(both.read_text("utf-8"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return make(tmp_path_factory.mktemp("empty"))


def test_page_needs_no_network_and_is_small(both, parsed):
    assert both.stat().st_size < 6_000_000
    assert not parsed.all("src")
    for tag, attrs in parsed.elements:
        for key in ("href", "xlink:href", "action", "data", "poster"):
            assert attrs.get(key, "#").startswith(("#", "data:")), (tag, attrs)
    html = both.read_text("utf-8")
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


def test_reproduced_figures_lead_to_records_with_everything(both, parsed):
    runs = re.findall(r'<pre tabindex="0" aria-label="Record of ([^"]+)">', both.read_text("utf-8"))
    assert len(runs) == len(set(runs)) == len(plan("smoke")) + len(plan("paper"))
    html = both.read_text("utf-8")
    run = next(p for p in plan("paper") if p.spec.condition == "mol-top3").run_id
    block = html[html.index(f'id="run-{run}"') :]
    pre = Page(block[block.index("<pre") : block.index("</pre>") + 6])
    record = json.loads("".join(pre.words))
    stored = json.loads((both.parent / "runs/paper" / run / "record.json").read_text())
    assert record["spec"] == stored["spec"]
    assert record["code_sha256"] == stored["provenance"]["code_sha256"]
    assert len(record["metrics"]) == len(stored["metrics"])
    assert record["metrics"][0]["value"] in {metric["value"] for metric in stored["metrics"]}
    cell = html[html.index('id="cell-t02.dense-full.ppl"') :]
    assert f'href="#run-{run}"' in cell[: cell.index("</tr>")]


def test_headline_counts_measured_cells_by_verdict(both, parsed):
    with duckdb.connect(str(both.parent / "mol.duckdb"), read_only=True) as database:
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


def test_sections_show_settings_counts_and_checks(both, parsed):
    for name in load_paper().experiments:
        assert name in parsed.all("id")
    html = both.read_text("utf-8")
    e05 = html[html.index('<section id="E05"') :]
    assert "3e-4" in e05[: e05.index("</section>")]
    e06 = html[html.index('<section id="E06"') :]
    assert "3e-4" not in e06[: e06.index("</section>")]
    assert {"counts", "checks", "counts-grid", "checks-grid"} <= set(parsed.all("id"))
    assert "84,722,688" in parsed.text


def test_claims_stand_with_their_experiment_and_scale(both, parsed):
    with duckdb.connect(str(both.parent / "mol.duckdb"), read_only=True) as database:
        rows = database.execute("SELECT claim_id, scale, outcome FROM claim_results").fetchall()
    assert rows
    assert {f"claim-{name}-{scale}" for name, scale, _ in rows} <= set(parsed.all("id"))
    held = sum((scale, outcome) == ("paper", "holds") for _, scale, outcome in rows)
    assert f"Claims at paper scale: ✓ {held} holds" in parsed.text


def test_same_database_gives_the_same_page(both):
    source = Source(both.parent / "mol.duckdb")
    figures = write_figures(source, both.parent / "again")
    assert render(source, figures, Extras()) == render(source, figures, Extras())


def test_empty_database_says_so(empty):
    page = Page(empty.read_text("utf-8"))
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


def hostile_runs(folder: Path) -> None:
    for planned in plan("smoke"):
        spec = planned.spec
        if spec.kind == "train" and spec.condition == "mol-top3":
            record = record_of(
                spec,
                train_metrics(spec, 3.0),
                hardware=CPU.model_copy(update={"name": HOSTILE}),
                data={"source": HOSTILE, HOSTILE: HOSTILE},
                notes=(HOSTILE,),
            )
            write_run(folder / "runs", record)


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


# ---- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    if reason := browser.missing():
        pytest.skip(reason)
    with browser.Browser() as opened:
        yield opened


@pytest.fixture
def page(chromium, both):
    chromium.resize(1280, 900)
    chromium.scheme("light")
    chromium.open(both)
    return chromium


SHOWN = "[...document.querySelectorAll('table.cells tbody tr')].filter(r => r.offsetParent)"


def test_console_is_silent_in_every_state(page, empty):
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.run("document.querySelectorAll('.sort').forEach(b => b.click())")
    page.open(empty)
    assert page.errors() == []


def test_filter_by_verdict_text_and_table(page):
    def choose(**values):
        for name, value in values.items():
            page.run(f"document.getElementById('filter').elements.{name}.value = {value!r}")
        page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")
        return page.run(f"return {SHOWN}.map(r => [r.id, r.dataset.verdict, r.dataset.table])")

    everything = page.run("return document.querySelectorAll('table.cells tbody tr').length")
    results = choose()
    assert 0 < len(results) < everything  # settings are not shown at first
    under = choose(verdict="under-powered")
    assert under and {row[1] for row in under} == {"under-powered"}
    narrowed = choose(text="deltanet PPL", table="2")
    assert {row[0] for row in narrowed} < {row[0] for row in under}
    assert {row[2] for row in narrowed} == {"2"}
    status = page.run("return document.querySelector('#filter output').textContent")
    assert status == f"{len(narrowed)} of {everything} numbers"
    sections = page.run(
        "return [...document.querySelectorAll('section.experiment')].filter(s => s.offsetParent)"
        ".map(s => s.id)"
    )
    assert sections == ["E06"]
    assert choose(text="no such words") == []
    page.run("document.querySelector('#filter button[type=reset]').click()")
    page.wait_for(f"{SHOWN}.length === {len(results)}")
    assert len(choose(kind="")) == everything


def test_tile_filters_by_its_verdict(page):
    count = page.run(
        "const tile = document.querySelector('.tiles button[data-verdict=\"not reproduced\"]');"
        "tile.click(); return Number(tile.querySelector('b').textContent)"
    )
    assert count > 0
    shown = page.run(f"return {SHOWN}.map(r => r.dataset.kind + ' ' + r.dataset.verdict)")
    assert shown == ["measured not reproduced"] * count


def test_sort_orders_numbers_and_tells_screen_readers(page):
    read = (
        "const t = document.getElementById('E06-table-2');"
        "return [...t.tBodies[0].rows].filter(r => r.offsetParent && r.cells[3].dataset.sort)"
        ".map(r => Number(r.cells[3].dataset.sort))"
    )
    click = "document.querySelectorAll('#E06-table-2 .sort')[3].click()"
    state = "return document.querySelectorAll('#E06-table-2 th')[3].getAttribute('aria-sort')"
    before = page.run(read)
    page.run(click)
    assert page.run(state) == "ascending" and page.run(read) == sorted(before)
    page.run(click)
    assert page.run(state) == "descending" and page.run(read) == sorted(before, reverse=True)
    assert before != sorted(before)


def test_figure_leads_to_its_record(page):
    page.run("document.querySelector('#E06-table-2 td[data-label=Reproduced] a').click()")
    page.wait_for("document.querySelector('details.record:target')?.open")
    inside = page.run(
        "const r = document.querySelector('details.record:target').getBoundingClientRect();"
        "return r.top >= 0 && r.top < innerHeight"
    )
    assert inside


def test_link_to_a_filtered_row_shows_it(page, both):
    setting = next(cell.cell_id for cell in load_paper().cells if cell.kind == "setting")
    page.open(both, f"#cell-{setting}")
    page.wait_for(f"document.getElementById('cell-{setting}').offsetParent")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_scrolls_sideways(page, width):
    page.resize(width, 800, phone=width < 500)
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide = page.run("const e = document.documentElement; return e.scrollWidth - e.clientWidth")
    assert wide == 0
    drawn = page.run("return document.querySelector('figure svg').getBoundingClientRect().width")
    assert min(width, 480) * 0.6 < drawn <= width


CONTRAST = """
const channel = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = parse(c).map(v => channel(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; const p = parse(c);
  if (p.length === 3 || p[3] === 1) return c; } return 'rgb(255, 255, 255)'; };
const low = {};
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('svg') || !e.offsetParent) continue;
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) low[e.tagName + '.' + e.className] = ratio;
}
for (const t of document.querySelectorAll('figure text')) {
  const [a, b] = [light(getComputedStyle(t).fill), light(ground(t))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) low[t.textContent] = getComputedStyle(t).fill;
}
return low;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_schemes(page, scheme):
    page.scheme(scheme)
    body = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (body == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.run(CONTRAST) == {}


def test_keyboard_and_screen_reader_basics(page):
    assert page.run("return document.documentElement.lang") == "en"
    for landmark in ("header", "nav[aria-label]", "main", "footer", "form[role=search]"):
        assert page.run(f"return document.querySelectorAll('{landmark}').length") == 1
    first = page.run(
        "const all = document.querySelectorAll('a, button, input, select, summary');"
        "all[0].focus(); return [all[0].className, getComputedStyle(all[0]).left]"
    )
    assert first == ["skip", "16px"]
    for selector, fault in {
        "input, select": "!e.labels.length",
        "button": "!e.textContent.trim()",
        "th": "!e.scope",
        "table": "!e.caption",
        "figure svg": "e.getAttribute('role') !== 'img'"
        " || !document.getElementById(e.getAttribute('aria-labelledby'))",
    }.items():
        found = f"[...document.querySelectorAll('{selector}')]"
        assert page.run(f"return {found}.length") > 0
        assert page.run(f"return {found}.filter(e => {fault}).length") == 0, selector
    levels = page.run("return [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


def test_print_shows_tables_without_controls(page):
    page.command("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        hidden = "return getComputedStyle(document.querySelector('{}')).display"
        assert page.run(hidden.format("#filter")) == "none"
        assert page.run(hidden.format(".record pre")) == "none"
        assert page.run(hidden.format("table.cells tbody tr:not([hidden])")) == "table-row"
    finally:
        page.command("Emulation.setEmulatedMedia", {"media": ""})


def test_hostile_record_runs_nothing(chromium, tmp_path):
    hostile_runs(tmp_path)
    chromium.open(make(tmp_path))
    assert chromium.run("return document.title") != "taken"
    assert chromium.errors() == []
