"""Whatever a record or a source's name holds stays text on the page and in the tables."""

import csv
import io
import re
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_up_paper import write_paper
from pages import page_of
from synthetic import CPU, curve_of, record_of, train_metrics, write_run, write_train

from mol.plan.build import plan
from mol.report.markup import csv_cell, csv_text, markdown, tex
from mol.report.page import Extras
from mol.report.tables import write_tables
from mol.store.ingest import build

HOSTILE = [
    "<script>document.title='taken'</script>",
    "</pre></td></table><img src=x onerror=alert(1)>",
    "\" onmouseover=\"alert(1)\" x='",
    "javascript:alert(1)",
    "<!-- <style>*{display:none}</style>",
    "]]></script><svg/onload=alert(1)>",
    "{{ 7 * 191 }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}${7*191}#{7*191}",
    "&lt;b&gt;&amp;&#60;i&#62;",
    "=HYPERLINK(\"http://x\",\"y\")",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "-2 +3+cmd|' /C calc'!A0",
    "\t=1+1",
    "\uff1d1+1",
    "| a | b |\n|---|---|",
    "[click](javascript:alert(1)) ![x](y) `code` **bold** <u>",
    "\\input{/etc/passwd} \\write18{touch hacked} $x^2$ %comment ~ # & _ { }",
    "\u202egnp.exe\u2066 \u200f\u061c\u200b\ufeff",
    "a\0b\x1b[31mred\x07\r\nnext line",
    "e\u0301" * 50 + "\u0300" * 300,
    "x" * 20_000,
]  # fmt: skip
BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"


class Elements(HTMLParser):
    """Tags, attributes and text of a page, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.events, self.links, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.events += [name for name, _ in attributes if name.startswith("on")]
        self.links += [value for name, value in attributes if name in ("href", "src")]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Pages and tables of the made-up paper: of ordinary records, and of hostile ones."""
    folders = {}
    for kind in ("ordinary", "hostile"):
        folder = folders[kind] = tmp_path_factory.mktemp(kind)
        paper = write_paper(folder / "paper")
        specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"]
        for number, spec in enumerate(specs):
            if kind == "ordinary":
                write_train(folder / "runs", spec, 3.0)
                continue
            texts = HOSTILE[number :: len(specs)]
            record = record_of(
                spec,
                train_metrics(spec, 3.0),
                hardware=CPU.model_copy(update={"name": texts[0]}),
                data={"source": " ".join(texts), **{text[:150]: text for text in texts}},
                notes=(*texts, *(f"text: {text}" for text in texts)),
            )
            provenance = record.provenance.model_copy(
                update={
                    "command": texts[-1],
                    "git_commit": texts[0],
                    "versions": {texts[0]: texts[-1]},
                }
            )
            record = record.model_copy(update={"provenance": provenance})
            write_run(folder / "runs", record, curve_of(spec, 3.0))
        assert build(folder / "mol.duckdb", folder / "runs", folder / "none", paper) == []
        page_of(folder / "mol.duckdb", folder, paper, Extras())
        write_tables(folder / "mol.duckdb", folder / "tables")
    return folders


def test_the_page_has_no_element_that_a_record_brought(made):
    ordinary, hostile = (
        Elements((made[kind] / "index.html").read_text("utf-8")) for kind in ("ordinary", "hostile")
    )
    assert hostile.tags.count("script") == ordinary.tags.count("script")
    assert set(hostile.tags) <= set(ordinary.tags) | {"details", "summary", "pre", "li", "ul"}
    assert "u" not in hostile.tags and hostile.events == ordinary.events
    assert not [link for link in hostile.links if link and link.lower().startswith("javascript")]
    text = "".join(hostile.words)
    assert "document.title='taken'" in text, "shown as text"
    assert "7 * 191" in text and "1337" not in text, "no template was evaluated"


def test_no_text_turns_the_reading_direction(made):
    for path in (made["hostile"] / "index.html", *(made["hostile"] / "tables").iterdir()):
        found = set(path.read_text("utf-8")) & set(BIDI)
        assert not found, (path.name, found)


def test_markdown_tables_keep_their_columns_and_hold_no_markup(made):
    for path in (made["hostile"] / "tables").glob("*.md"):
        widths = []
        for line in path.read_text("utf-8").splitlines():
            bare = re.sub(r"\\.", "", line)
            assert not re.search(r"[<`\[$]", bare), line
            widths.append(bare.count("|") if line.startswith("|") else 0)
        for above, below in zip(widths, widths[1:], strict=False):
            assert not above or not below or above == below


def test_latex_tables_hold_no_command_of_a_record(made):
    for path in (made["hostile"] / "tables").glob("*.tex"):
        text = path.read_text("utf-8")
        assert r"\input" not in text and r"\write" not in text
        assert text.count(r"\begin{") == text.count(r"\end{")


def test_no_cell_of_a_csv_is_a_formula(made):
    cells = 0
    for path in (made["hostile"] / "tables").glob("*.csv"):
        rows = list(csv.reader(io.StringIO(path.read_text("utf-8"))))
        assert len({len(row) for row in rows}) == 1
        for cell in (cell for row in rows for cell in row):
            cells += 1
            if cell[:1] in tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20"):
                assert re.fullmatch(r"[-+][\d.,e×%hKMB-]+( \([-+\d., a-z%]*\))?", cell), cell
    assert cells > 100


texts = st.text(max_size=40) | st.sampled_from(HOSTILE)


@given(texts)
def test_a_markdown_cell_is_one_line_of_text(text):
    found = markdown(text)
    assert found.isprintable() and not set(found) & set(BIDI)
    assert not re.search(r"[|<`\[\]*_$&!]", re.sub(r"\\.", "", found))


@given(texts)
def test_a_latex_cell_is_balanced_and_inert(text):
    found = tex(text)
    commands = set(re.findall(r"\\([a-zA-Z]+)", found))
    assert commands <= {
        "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar",
        "textquotedbl", "Delta", "times", "pm", "dag", "approx", "leq", "geq", "tau", "mu", "sigma",
        "to",
    }  # fmt: skip
    bare = re.sub(r"\\[{}$&#_%]", "", found)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert not re.search(r"[#&%_~^]", bare) and "\n" not in found


@given(texts)
@example("-1 +cmd|' /C calc'!A0")
@example("+0.5 =1+1")
@example("\ufeff=1+1")
@example(" \t@x")
def test_a_csv_cell_is_no_formula_and_comes_back(text):
    cell = csv_cell(text)
    if cell[:1] in ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20"):
        assert re.fullmatch(r"[-+][\d.,]+(e-?\d+)?[%×hKMB]?( \([-+\d., a-z%]*\))?", cell)
    (header, row) = csv.reader(io.StringIO(csv_text(["a", "b"], [[text, "end"]])))
    assert row == [cell, "end"]
