"""`index.html`: the whole report as one page that needs no network. Records are untrusted text:
every value reaches the page through autoescaping."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mol.base import canonical_json, write_atomic
from mol.report.captions import MEANING, hardware_of
from mol.report.figures import Figure
from mol.report.sheet import COLORS, GROUND, INK, MUTED, RULE, figure_text
from mol.report.source import SCALES, Row, Source

_HERE = Path(__file__).parent
_SVG_COLORS = {INK: "ink", MUTED: "muted", RULE: "rule", GROUND: "ground"} | {
    color: name for name, color in COLORS.items()
}
# Verdicts in the order of the headline: name, sign (color is never the only cue), CSS class.
VERDICTS = {
    "reproduced": ("✓", "good"),
    "not reproduced": ("✗", "bad"),
    "under-powered": ("≈", "weak"),
    "not judgeable here": ("?", "other"),
    "not run at paper scale": ("–", "none"),
    "not run": ("–", "none"),
    "agrees": ("✓", "good"),  # counts
    "contradicted": ("✗", "bad"),
}


@dataclass(frozen=True)
class Extras:
    """Tables of the page that do not come from the database; None: not available."""

    counts: list[Row] | None = None
    checks: list[Row] | None = None
    settings: list[Row] | None = None


def write_page(source: Source, figures: list[Figure], extras: Extras, out: Path) -> Path:
    """Write `out`/index.html and return its path."""
    path = out / "index.html"
    write_atomic(path, render(source, figures, extras))
    return path


def render(source: Source, figures: list[Figure], extras: Extras) -> str:
    """The page as a string; the same for the same database and figures."""
    cells = _cells(source)
    measured = [cell for cell in cells if cell["kind"] == "measured" and cell["verdict"]]
    counted = Counter(cell["verdict"] for cell in cells if cell["verdict"])
    order = [*VERDICTS, *sorted(set(counted) - set(VERDICTS))]
    return (
        _environment()
        .get_template("page.html")
        .render(
            cells=cells,
            measured=len(measured),
            reproduced=sum(cell["verdict"] == "reproduced" for cell in measured),
            verdicts=[(name, counted[name], *_look(name)) for name in order if counted[name]],
            kinds=Counter(cell["kind"] for cell in cells),
            tables=sorted({cell["table"] for cell in cells}, key=_table_order),
            sections=_sections(source, cells, figures, extras),
            rest=[cell for cell in cells if not cell["section"]],
            runs=[_run(run) for run in source.runs.values()],
            scales=Counter(
                run["scale"] for run in source.runs.values() if run["status"] == "complete"
            ),
            meaning=MEANING,
            refused=source.table("refused"),
            counts=extras.counts,
            checks=extras.checks,
            check_results=Counter(row.get("result") for row in extras.checks or ()),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([_HERE / "templates", _HERE / "assets"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "look": _look,
        "number": figure_text,
        "signed": lambda value: ("+" if value > 0 else "") + figure_text(value, 3),
        "show": _show,
    }
    environment.globals["asset"] = lambda name: Markup((_HERE / "assets" / name).read_text("utf-8"))
    return environment


def _look(verdict: str) -> tuple[str, str]:
    return VERDICTS.get(verdict, ("·", "other"))


def _show(value: Any) -> str:
    """Any value of an extra table as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table_order(table: str) -> tuple[int, str]:
    return (int(table), "") if table.isdigit() else (10_000, table)


def _cells(source: Source) -> list[Row]:
    """Printed cells, each with its verdict and with the figure of the largest scale that has one.

    A verdict is the paper scale's; where nothing ran there, what the other scales say instead.
    """
    found: dict[str, list[Row]] = {}
    for row in source.table("verdicts"):
        found.setdefault(row["cell_id"], []).append(row)
    homes: dict[str, str] = {}  # a table's cells without an experiment stand with its others
    for cell in source.table("cells"):
        if cell["experiment"] and cell["table"] != "text":
            homes.setdefault(cell["table"], cell["experiment"])
    shown = []
    for cell in source.table("cells"):
        rows = sorted(
            found.get(cell["cell_id"], []), key=lambda row: SCALES.index(row["scale"]), reverse=True
        )
        figures = [row for row in rows if row["reproduced"] is not None]
        run = [row for row in rows if row["verdict"] != "not run"]
        shown.append(
            cell
            | {
                "section": cell["experiment"] or homes.get(cell["table"], ""),
                "verdict": next((row["verdict"] for row in run or rows), None) or "",
                "figure": figures[0] if figures else None,
                "rows": rows,
            }
        )
    return shown


def _sections(
    source: Source, cells: list[Row], figures: list[Figure], extras: Extras
) -> list[dict[str, Any]]:
    """One section an experiment, in the paper's order."""
    sections = []
    for experiment in source.table("experiments"):
        name = experiment["experiment"]
        own = [cell for cell in cells if cell["section"] == name]
        tables: dict[str, list[Row]] = {}
        for cell in own:
            tables.setdefault(cell["table"], []).append(cell)
        sections.append(
            experiment
            | {
                "tables": tables,
                "verdicts": Counter(cell["verdict"] for cell in own if cell["verdict"]),
                "figures": [
                    (figure, _inline_svg(figure)) for figure in figures
                    if figure.spec.experiment == name
                ],
                "claims": [
                    row for row in source.table("claim_results") if row.get("experiment") == name
                ],
                "settings": [
                    row for row in extras.settings or () if name in row.get("experiments", ())
                ],
                "runs": [source.runs[run] for run in source.experiments.get(name, ())],
            }
        )  # fmt: skip
    return sections


def _inline_svg(figure: Figure) -> Markup:
    """The drawing for use inside the page: own ids, colors that follow the theme, a name."""
    text = figure.svg.read_text("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    own = f"{figure.spec.id}-{figure.scale}-"
    text = re.sub(r'\bid="', f'id="{own}', text)
    text = re.sub(r'href="#', f'href="#{own}', text)
    text = text.replace("url(#", f"url(#{own}")
    for color, name in _SVG_COLORS.items():
        text = re.sub(re.escape(color), f"var(--fig-{name})", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=\bsvg )", 'role="img" ', text, count=1)
    opening = text.index(">") + 1
    name = Markup('<title id="{}title">{}</title>').format(own, figure.alt)
    tag = text[: opening - 1] + f' aria-labelledby="{own}title">'
    return Markup(tag) + name + Markup(text[opening:])


def _run(run: Row) -> Row:
    return run | {"machine": hardware_of(run), "record": _record(run)}


def _record(run: Row) -> str:
    """The record as JSON, one fact a line; absent values are left out."""
    lines = []
    for key, value in run.items():
        if key == "metrics" or value is None:
            continue
        if isinstance(value, dict):
            inner = ",\n".join(
                f"  {json.dumps(name)}: {canonical_json(part)}" for name, part in value.items()
            )
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            plain = value if isinstance(value, bool | int | float | list) else str(value)
            lines.append(f" {json.dumps(key)}: {json.dumps(plain, ensure_ascii=False)}")
    metrics = ",\n".join("  " + canonical_json(_given(metric)) for metric in run["metrics"])
    lines.append(f' "metrics": [\n{metrics}\n ]' if metrics else ' "metrics": []')
    return "{\n" + ",\n".join(lines) + "\n}"


def _given(metric: Row) -> Row:
    return {
        key: value
        for key, value in metric.items()
        if key != "run_id" and value is not None and value != {}
    }
