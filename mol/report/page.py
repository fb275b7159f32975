"""`index.html`: the whole report as one page that needs no network. Records are untrusted text:
every value reaches the page through autoescaping."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mol.base import canonical_json, write_atomic
from mol.report.blocks import claimed_paths, costed, drawn, score_rows, text_rows, training
from mol.report.captions import MEANING, hardware_of
from mol.report.fastest import fastest
from mol.report.figures import Figure
from mol.report.markup import TURNS
from mol.report.number import figure_text
from mol.report.protocols import headline
from mol.report.sheet import COLORS, GROUND, INK, MUTED, RULE
from mol.report.source import SCALES, Row, Source
from mol.report.view import View

_HERE = Path(__file__).parent
_SVG_COLORS = {INK: "ink", MUTED: "muted", RULE: "rule", GROUND: "ground"} | {
    color: name for name, color in COLORS.items()
}
# Verdicts in the order of the headline: name -> sign (color is never the only cue), CSS class.
MEASURED = {
    "reproduced": ("✓", "good"),
    "not reproduced": ("✗", "bad"),
    "under-powered": ("≈", "weak"),
    "not judgeable here": ("?", "other"),
    "not run at paper scale": ("–", "none"),
    "not run": ("–", "none"),
}
# Counts are recomputed from configurations, derived numbers from the paper's own numbers.
RECOMPUTED = {
    "agrees": ("✓", "good"),
    "agrees only unrounded": ("≈", "weak"),
    "contradicted": ("✗", "bad"),
    "not checkable": ("?", "none"),
    "flag": ("!", "weak"),
    "no flag": ("✓", "good"),
}
CLAIMS = {
    "holds": ("✓", "good"),
    "does not hold": ("✗", "bad"),
    "undecided": ("≈", "weak"),
}
FIGURES = ("value", "stderr", "low", "high")  # of a metric, the parts that runs do not share
LOOKS = CLAIMS | MEASURED | RECOMPUTED


@dataclass(frozen=True)
class Extras:
    """Rows of the page that do not come from the database; empty: not available."""

    counts: list[Row] = field(default_factory=list)
    settings: list[Row] = field(default_factory=list)
    protocols: list[Row] = field(default_factory=list)
    title: str = ""  # of the paper
    task_versions: dict[str, str] = field(default_factory=dict)  # of the paper's harness
    steps: dict[str, int] = field(default_factory=dict)  # of the paper's training, by condition


def write_page(source: Source, figures: list[Figure], extras: Extras, out: Path) -> Path:
    """Write `out`/index.html and return its path."""
    path = out / "index.html"
    write_atomic(path, render(source, figures, extras))
    return path


def render(source: Source, figures: list[Figure], extras: Extras) -> str:
    """The page as a string; the same for the same database and figures."""
    views = source.views
    measured = [view for view in views if view.cell["kind"] == "measured"]
    others = [view for view in views if view.cell["kind"] != "measured"]
    checks = source.table("checks")
    apart = ("contradicted", "flag")
    by_verdict = {name: [row for row in checks if row["verdict"] == name] for name in apart}
    by_verdict["rest"] = [row for row in checks if row["verdict"] not in apart]
    sections, rest = _sections(source, figures, extras)
    lines: dict[str, int] = {}  # of all records, each once: runs repeat most of each other's
    complete = Counter(run["scale"] for run in source.runs.values() if run["status"] == "complete")
    page = _environment().get_template("page.html").render(
        title=extras.title,
        total=len(views),
        kinds=sorted(Counter(view.cell["kind"] for view in views).items()),
        tables=sorted({view.cell["table"] for view in views}, key=_table_order),
        measured=_tally(measured),
        recomputed=_tally(others),
        reproduced=sum(view.verdict == "reproduced" for view in measured),
        judged=len(measured),
        sections=sections,
        rest=rest,
        runs=[_run(run, lines) for run in source.runs.values()],
        lines=lines,
        scales=[(MEANING[scale], complete[scale]) for scale in SCALES if complete[scale]],
        refused=source.table("refused"),
        counts=extras.counts,
        protocols=[_protocol(row) for row in extras.protocols],
        protocols_headline=headline(extras.protocols),
        checks=by_verdict if checks else {},
        claims=[
            (MEANING[scale], _counted(Counter(row["outcome"] for row in claims)))
            for scale in SCALES
            if (claims := [r for r in source.table("claim_results") if r["scale"] == scale])
        ],
        check_tally=_counted(Counter(row["verdict"] for row in checks)),
    )  # fmt: skip
    for turn, shown in TURNS.items():  # str.translate takes ten times as long on a long page
        page = page.replace(chr(turn), shown)
    return page


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
        "show": _show,
    }
    environment.globals["asset"] = lambda name: Markup((_HERE / "assets" / name).read_text("utf-8"))
    return environment


def _look(verdict: str) -> tuple[str, str]:
    return LOOKS.get(verdict, ("·", "other"))


def _tally(views: list[View]) -> list[tuple[str, int]]:
    """How many views have which verdict."""
    return _counted(Counter(view.verdict for view in views if view.verdict))


def _counted(counts: Counter) -> list[tuple[str, int]]:
    order = [*LOOKS, *sorted(set(counts) - set(LOOKS))]
    return [(verdict, counts[verdict]) for verdict in order if counts[verdict]]


def _show(value: Any) -> str:
    """Any value of an extra table as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value))
    if isinstance(value, float):
        return figure_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table_order(table: str) -> tuple[int, str]:
    return (int(table), "") if table.isdigit() else (10_000, table)


def _sections(
    source: Source, figures: list[Figure], extras: Extras
) -> tuple[list[dict[str, Any]], dict[str, list[View]]]:
    """One section an experiment, in the paper's order, and the tables of what belongs to none."""
    homes: dict[str, str] = {}  # a table's cells without an experiment stand with its others
    for cell in source.table("cells"):
        if cell["experiment"] and cell["table"] != "text":
            homes.setdefault(cell["table"], cell["experiment"])
    placed: dict[str, dict[str, list[View]]] = {}
    for view in source.views:
        table = view.cell["table"]
        home = view.cell["experiment"] or homes.get(table, "")
        placed.setdefault(home, {}).setdefault(table, []).append(view)
    sections = []
    for experiment in source.table("experiments"):
        name = experiment["experiment"]
        tables = placed.pop(name, {})
        own_figures = drawn(figures, name)
        shown = list(dict.fromkeys(figure.spec.id for figure in own_figures))
        runs = [source.runs[run] for run in source.experiments.get(name, ())]
        judging = [run for run in runs if run["status"] == "complete"]
        own = {run["run_id"] for run in runs}
        own_figures.sort(
            key=lambda figure: (shown.index(figure.spec.id), -SCALES.index(figure.scale))
        )
        sections.append(
            experiment
            | {
                "tables": tables,
                "tally": _tally([view for views in tables.values() for view in views]),
                "figures": [(figure, _inline_svg(figure)) for figure in own_figures],
                "claims": _claims(source, name),
                "settings": [row for row in extras.settings if name in row["experiments"]],
                "training": training(judging, extras.steps),
                "paths": claimed_paths(source, name),
                "fastest": fastest(judging),
                "texts": text_rows(judging),
                "scores": score_rows(judging, extras.task_versions),
                "comparisons": [r for r in source.table("comparisons") if r["run_id"] in own],
                "runs": [costed(run) for run in runs],
                "not_run": [r for r in source.table("not_run") if name in r["experiments"]],
            }
        )
    rest: dict[str, list[View]] = {}
    for tables in placed.values():
        for table, views in tables.items():
            rest.setdefault(table, []).extend(views)
    return sections, rest


def _claims(source: Source, experiment: str) -> list[Row]:
    """Results of an experiment's claims. What decides a claim at the paper's scale stands with
    its result at a smaller one, where there is one, instead of in a row of its own."""
    found = [row for row in source.table("claim_results") if row["experiment"] == experiment]
    needs = {row["claim_id"]: row["needs"] for row in found if row["outcome"] == "not run"}
    judged = {row["claim_id"] for row in found if row["outcome"] != "not run"}
    return [
        row | {"needs": needs.get(row["claim_id"])}
        for row in found
        if row["outcome"] != "not run" or row["claim_id"] not in judged
    ]


def _protocol(row: Row) -> Row:
    """A figure of a protocol matrix with its protocol in words."""
    parts = [
        row["split"], row["pad"] and f"PAD {row['pad'].removeprefix('pad_')}", row["layout"],
        row["context"] and f"context {row['context']}, stride {row['stride']}",
        row["eos"] and f"end of text {row['eos'].replace('_', ' ')}",
        row["text"] and f"{row['text']} text", row["note"],
    ]  # fmt: skip
    return row | {"protocol": ", ".join(part for part in parts if part)}


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


def _run(run: Row, lines: dict[str, int]) -> Row:
    """A run with the places of its record's lines in `lines`, to which new ones are added."""
    places = [lines.setdefault(line, len(lines)) for line in _record(run).split("\n")]
    return run | {"machine": hardware_of(run), "record": " ".join(map(str, places))}


_PLAIN = json.JSONEncoder(ensure_ascii=False)


def _record(run: Row) -> str:
    """The record as JSON, one fact a line; absent values are left out. A metric is two lines: which
    it is, and its figures."""
    lines = []
    for key, value in run.items():
        if key == "metrics" or value is None:
            continue
        if isinstance(value, dict):
            inner = ",\n".join(
                f"  {json.dumps(name)}: {canonical_json(part)}" for name, part in value.items()
            )
            lines.append(f' "{key}": {{\n{inner}\n }}')
        else:
            plain = value if isinstance(value, bool | int | float | list) else str(value)
            lines.append(f' "{key}": {_PLAIN.encode(plain)}')
    metrics = ",\n".join(map(_metric, run["metrics"]))
    lines.append(f' "metrics": [\n{metrics}\n ]' if metrics else ' "metrics": []')
    return "{\n" + ",\n".join(lines) + "\n}"


def _metric(metric: Row) -> str:
    which, figures = {}, {}
    for key, value in metric.items():
        if key != "run_id" and value is not None and value != {}:
            (figures if key in FIGURES else which)[key] = value
    return f"  {canonical_json(which)[:-1]},\n   {canonical_json(figures)[1:]}"
