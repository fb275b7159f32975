"""Perplexity by configuration: the paper's printed means beside ours, row by row."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from mol.paper.printed import parse
from mol.report.captions import HEADING, caption
from mol.report.number import figure_text
from mol.report.sheet import (
    COLORS,
    GROUND,
    INK,
    RULE,
    Drawing,
    PanelRow,
    Sheet,
    say_missing,
)
from mol.report.source import Row, Source, printed_value
from mol.report.verdicts import mean_half_width

if TYPE_CHECKING:
    from mol.report.figures import FigureSpec

_ROW = 0.29  # inches a configuration takes
# Which of the perplexities of a run is drawn; padded data give two, and PAD-free is the unit
# that a reader of perplexities expects.
_PADS = ("masked", "none")


def draw_ranking(spec: FigureSpec, source: Source, scale: str) -> Drawing:
    cells = source.cells(spec.table, column=spec.column)
    runs = [_seed_runs(source, scale, cell) for cell in cells]
    used = list({run["run_id"]: run for found in runs for run in found}.values())
    values = [[_perplexity(run) for run in found] for found in runs]
    missing = [_name(cell) for cell, found in zip(cells, values, strict=True) if not found]
    notes = [
        "Paper: filled, mean of seeds with the printed ±; open, one seed. "
        "Ours: mean, each seed as a small ring, t-interval (95 %) where there are three; "
        "validation split, PAD masked.",
        "The paper does not say whether its perplexities count PAD."
        if scale == "paper"
        else "The two panels have unlike scales: compare the order of the rows, not the values.",
    ]
    height = max(_ROW * len(cells), 1.0)
    headings = ("Paper, printed", HEADING[scale].replace(": ", ":\n"))
    row = PanelRow(headings, height, left=1.24, gap=0.16, below=0.45)
    sheet = Sheet(spec.title, [row], caption(scale, used, missing, notes))
    ours, paper = sheet.axes[0][1], sheet.axes[0][0]
    names = [_name(cell) for cell in cells]
    _draw(paper, names, [_printed(cell) for cell in cells], COLORS["blue"], "nothing printed")
    _draw(
        ours,
        names,
        [_measured(found) for found in values],
        COLORS["red"],
        f"no complete run\nat {scale} scale",
    )
    ours.set_yticklabels([])
    if scale == "paper" and used:
        limits = [*paper.get_xlim(), *ours.get_xlim()]
        paper.set_xlim(min(limits), max(limits))
        ours.set_xlim(min(limits), max(limits))
    return Drawing(sheet, _alt(cells, values, scale), missing, bool(used))


def _name(cell: Row) -> str:
    return textwrap.fill(cell["row"].rstrip("†‡*"), 17)


def _seed_runs(source: Source, scale: str, cell: Row) -> list[Row]:
    runs = source.complete(scale, "train", cell["condition"])
    return [run for run in runs if run["seed"] in cell["seeds"] and _perplexity(run) is not None]


def _perplexity(run: Row) -> float | None:
    for metric in run["metrics"]:
        if (metric["name"], metric["split"]) == ("ppl", "validation") and metric["pad"] in _PADS:
            return metric["value"]
    return None


class _Point:
    """Center, half-width or None, single values, and the text beside."""

    def __init__(self, center: float, half: float | None, singles: list[float], text: str):
        self.center, self.half, self.singles, self.text = center, half, singles, text


def _printed(cell: Row) -> _Point:
    half = parse(cell["spread"]).value if cell["spread"] else None
    return _Point(printed_value(cell), half, [], cell["printed"])


def _measured(values: list[float]) -> _Point | None:
    if not values:
        return None
    half = mean_half_width(tuple(values))
    singles = values if len(values) > 1 else []
    return _Point(statistics.fmean(values), half, singles, figure_text(statistics.fmean(values)))


def _draw(axes: Axes, names: list[str], points: list[_Point | None], color: str, empty: str):
    axes.grid(False)
    axes.set(ylim=(max(len(names), 1) - 0.5, -0.5), yticks=range(len(names)), xlabel="perplexity")
    axes.set_yticklabels(names, color=INK)
    axes.tick_params(axis="y", length=0)
    known = [point for point in points if point]
    if not known:
        say_missing(axes, empty)
        return
    ends = [point.center + sign * (point.half or 0) for point in known for sign in (-1, 1)]
    span = max(ends) - min(ends) or 1.0
    axes.set_xlim(min(ends) - 0.08 * span, max(ends) + 0.62 * span)
    axes.locator_params(axis="x", nbins=2)
    for index, point in enumerate(points):
        axes.axhline(index, color=RULE, linewidth=0.6)
        if point is None:
            continue
        if point.half is not None:
            axes.hlines(index, point.center - point.half, point.center + point.half, color, lw=1.6)
        axes.plot(point.singles, [index] * len(point.singles), "o", ms=3, mfc="none", mec=color)
        filled = color if point.half is not None else GROUND
        axes.plot(point.center, index, "o", ms=5.5, color=color, mfc=filled, mew=1.3)
        axes.annotate(
            point.text,
            (point.center + (point.half or 0), index),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            size=7.8,
            bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.6},
        )


def _alt(cells: list[Row], values: list[list[float]], scale: str) -> str:
    parts = []
    for cell, found in zip(cells, values, strict=True):
        ours = f"{figure_text(statistics.fmean(found))} (n = {len(found)})" if found else "no run"
        parts.append(f"{cell['row']}: paper {cell['printed']}, ours at {scale} scale {ours}")
    return "Perplexity by configuration. " + "; ".join(parts) + "."
