import json

import browser
import pytest
from pages import hostile_runs, make

from mol.paper.reported import load_paper


@pytest.fixture(scope="module")
def chromium():
    if reason := browser.missing():
        pytest.skip(reason)
    with browser.Browser() as opened:
        yield opened


@pytest.fixture
def page(chromium, both_page):
    chromium.resize(1280, 900)
    chromium.scheme("light")
    chromium.open(both_page)
    return chromium


SHOWN = "[...document.querySelectorAll('table.cells tbody tr')].filter(r => r.offsetParent)"


def test_console_is_silent_in_every_state(page, empty_page):
    page.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.run("document.querySelectorAll('.sort').forEach(b => b.click())")
    page.open(empty_page)
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
    page.run("document.querySelector('#E06-table-2 td[data-label=Ours] a').click()")
    page.wait_for("document.querySelector('details.record:target')?.open")
    page.wait_for("document.querySelector('details.record:target pre').textContent")
    shown = page.run("return document.querySelector('details.record:target pre').textContent")
    assert page.run("return location.hash") == f"#run-{json.loads(shown)['run_id']}"
    inside = page.run(
        "const r = document.querySelector('details.record:target').getBoundingClientRect();"
        "return r.top >= 0 && r.top < innerHeight"
    )
    assert inside


def test_link_to_a_filtered_row_shows_it(page, both_page):
    setting = next(cell.cell_id for cell in load_paper().cells if cell.kind == "setting")
    page.open(both_page, f"#cell-{setting}")
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
