"""Validation perplexity against step: our curves, and what the paper prints about its own."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mol.paper.printed import parse
from mol.report.captions import HEADING, caption
from mol.report.crossover import first_that_stays
from mol.report.number import figure_text
from mol.report.sheet import (
    COLORS,
    GROUND,
    INK,
    MUTED,
    Drawing,
    PanelRow,
    Sheet,
    label_points,
    log_ticks,
    nice_ticks,
    say_missing,
    short_number,
)
from mol.report.source import Row, Source, printed_value

if TYPE_CHECKING:
    from mol.report.figures import FigureSpec

Curve = list[tuple[int, float]]
_DENSE = 25  # points of a curve from which markers would hide it
_RIGHT = 1.36  # inches for names and values beside a panel


def draw_curves(spec: FigureSpec, source: Source, scale: str) -> Drawing:
    printed = {cell["condition"]: cell for cell in source.cells(spec.table, column=spec.column)}
    runs = {
        slug: [run for run in source.complete(scale, "train", slug) if _curve(source, run)]
        for slug in spec.series
    }
    missing = [spec.series[slug].label for slug, found in runs.items() if not found]
    crossings = _crossings(spec, source, runs)
    used = [run for found in runs.values() for run in found]
    notes = [f"Paper: printed final values and steps only ({spec.place}); no curve is traced."]
    notes += [f"Our steps of crossing {_baseline(spec)}: {crossings[1]}."] if crossings[1] else []

    parts = {run["spec"]["evaluation"]["curve_sequences"] for run in used}
    if parts:
        counts = " or ".join(f"{count:,}" for count in sorted(parts))
        notes.append(
            f"Our curves: the first {counts} validation sequences; the table's perplexity is of "
            "more text."
        )

    same_axes = scale == "paper" and bool(used)
    heading = HEADING[scale] + (" (hollow: printed by the paper)" if same_axes else "")
    ours = PanelRow((heading,), 2.3 if used else 0.8, right=_RIGHT)
    rows = [PanelRow(("Paper: what it prints",), 1.6, right=_RIGHT)]
    rows = [ours] if same_axes else [*rows, ours]
    sheet = Sheet(spec.title, rows, caption(scale, used, missing, notes))
    if not used:
        say_missing(sheet.axes[-1][0], f"no complete run at {scale} scale")
    _draw_ours(sheet.axes[-1][0], spec, source, runs, crossings[0], printed if same_axes else {})
    if not same_axes:
        _draw_printed(sheet.axes[0][0], spec, source, printed)
    return Drawing(sheet, _alt(spec, source, runs, printed, scale), missing, bool(used))


def _curve(source: Source, run: Row) -> Curve:
    return source.validation_curve(run["run_id"])


def _baseline(spec: FigureSpec) -> str:
    return spec.series[spec.baseline].label


def _crossings(
    spec: FigureSpec, source: Source, runs: dict[str, list[Row]]
) -> tuple[dict[str, tuple[float, float]], str]:
    """By series, the steps between which its first seed crosses the baseline's for good; and
    the same in words."""
    if not spec.baseline or not runs[spec.baseline]:
        return {}, ""
    baseline = dict(_curve(source, runs[spec.baseline][0]))
    places, words = {}, []
    for slug in spec.crossing:
        if not runs[slug]:
            continue
        curve = _curve(source, runs[slug][0])
        gaps = [(step, nll - baseline[step]) for step, nll in curve if step in baseline]
        place = first_that_stays(gaps)
        if place is None:
            words.append(f"{spec.series[slug].label} never")
        elif place[0] == place[1]:
            words.append(f"{spec.series[slug].label} below from the first point, {place[0]:,}")
        else:
            places[slug] = place
            words.append(f"{spec.series[slug].label} between {place[0]:,} and {place[1]:,}")
    return places, ", ".join(words)


def _draw_printed(axes: Axes, spec: FigureSpec, source: Source, printed: dict[str, Row]) -> None:
    values = {slug: printed_value(printed[slug]) for slug in spec.series if slug in printed}
    axes.set(xlabel="step", xlim=(0, spec.final_step * 1.02))
    _step_ticks(axes)
    if not values:
        say_missing(axes, "no printed values in the database")
        return
    _log_perplexity(axes, list(values.values()), room=0.25)
    _draw_facts(axes, spec, source)
    for slug, value in values.items():
        style = spec.series[slug]
        axes.plot(
            spec.final_step, value, style.marker, color=COLORS[style.color], ms=6, mfc=GROUND,
            clip_on=False, zorder=4,
        )  # fmt: skip
    label_points(
        axes,
        [
            (spec.final_step, value, f"{spec.series[slug].label} {printed[slug]['printed']}",
             COLORS[spec.series[slug].color])
            for slug, value in values.items()
        ],
    )  # fmt: skip


def _draw_facts(axes: Axes, spec: FigureSpec, source: Source) -> None:
    cells = {cell["cell_id"]: cell for cell in source.table("cells")}
    found = [(fact, cells[fact.cell]) for fact in spec.facts if fact.cell in cells]
    for index, (fact, cell) in enumerate(found):
        steps = parse(cell["printed"])
        if "-" in cell["printed"]:
            axes.axvspan(steps.low, steps.high, color=MUTED, alpha=0.3, linewidth=0)
        else:
            axes.axvline(steps.value, color=MUTED, linewidth=1, linestyle=(0, (4, 2)))
        axes.annotate(
            textwrap.fill(f"{fact.text}: {cell['printed']}", 15),
            (steps.high if "-" in cell["printed"] else steps.value, 0.98 - 0.5 * index),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            size=7.5,
            color=INK,
            bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )


def _draw_ours(
    axes: Axes,
    spec: FigureSpec,
    source: Source,
    runs: dict[str, list[Row]],
    crossings: dict[str, tuple[float, float]],
    printed: dict[str, Row],
) -> None:
    axes.set_xlabel("step")
    names, seen, longest = [], [], 0
    for slug, found in runs.items():
        style = spec.series[slug]
        color = COLORS[style.color]
        for run in found:
            steps, nll = zip(*_curve(source, run), strict=True)
            perplexity = [math.exp(value) for value in nll]
            longest = max(longest, len(steps))
            line = "-" if len(steps) > _DENSE else f"-{style.marker}"
            axes.plot(steps, perplexity, line, color=color, ms=3.5, linewidth=1.4)
            seen += perplexity
        if found:
            names.append(
                (steps[-1], perplexity[-1], f"{style.label} {figure_text(perplexity[-1])}", color)
            )
        if slug in printed:
            value = printed_value(printed[slug])
            axes.plot(spec.final_step, value, style.marker, color=color, ms=7, mfc=GROUND)
            seen.append(value)
    if not seen:
        return
    if longest > _DENSE:  # the start would flatten the end, which is what is compared
        seen = [value for value in seen if value <= 4 * max(y for _, y, _, _ in names)]
    _log_perplexity(axes, seen, room=0.05)
    axes.set_xlim(left=0)
    _step_ticks(axes)
    if printed:
        _draw_facts(axes, spec, source)
    for slug, (before, after) in crossings.items():
        color = COLORS[spec.series[slug].color]
        axes.axvline((before + after) / 2, color=color, linewidth=1, linestyle=":")
    label_points(axes, names)


def _step_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(short_number)


def _log_perplexity(axes: Axes, values: list[float], room: float) -> None:
    """Logarithmic y axis with round ticks and `room` of the range above and below."""
    low, high = math.log(min(values)), math.log(max(values))
    pad = max(high - low, 0.02) * room
    limits = math.exp(low - pad), math.exp(high + pad)
    axes.set(yscale="log", ylim=limits, ylabel="perplexity")
    log_ticks(axes.yaxis, nice_ticks(*limits))


def _alt(
    spec: FigureSpec,
    source: Source,
    runs: dict[str, list[Row]],
    printed: dict[str, Row],
    scale: str,
) -> str:
    """Final values in words."""
    parts = []
    for slug, style in spec.series.items():
        reported = printed[slug]["printed"] if slug in printed else "not printed"
        ends = [math.exp(_curve(source, run)[-1][1]) for run in runs[slug]]
        ours = ", ".join(figure_text(value) for value in ends) or "no run"
        parts.append(f"{style.label}: paper {reported}, ours at {scale} scale {ours}")
    return "Final perplexity. " + "; ".join(parts) + "."
