"""Timings against length: ours as lines, the paper's printed values as markers by GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from mol.report.captions import HEADING, caption, hardware_of
from mol.report.number import figure_text
from mol.report.sheet import (
    COLORS,
    GROUND,
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

_RIGHT = 1.45  # inches for the names beside a panel
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))


class Point(NamedTuple):
    x: float
    y: float
    low: float | None = None
    high: float | None = None


Points = dict[tuple[str, str], list[Point]]  # by series and way ("" for printed values)


def draw_bench(spec: FigureSpec, source: Source, scale: str) -> Drawing:
    groups = _printed(spec, source)
    benches: dict[str, Points] = {}
    used = []
    for run in source.complete(scale, "bench"):
        points = _measured(spec, run)
        if points:
            _join(benches.setdefault(hardware_of(run), {}), points)
            used.append(run)
    seen = {series for points in benches.values() for series, _ in points}
    missing = [style.label for slug, style in spec.series.items() if slug not in seen]
    notes = [f"Paper: printed values only ({spec.place}); markers are not joined."]
    if spec.ratio:
        over, under = (spec.series[slug].label for slug in spec.ratio)
        notes.append(f"Above each length: time of {over} over time of {under}.")

    names = [
        HEADING[scale] + (f" ({hardware})" if len(benches) > 1 else "") for hardware in benches
    ] or [HEADING[scale]]
    rows = _printed_rows(list(groups))
    height = 2.1 if benches else 0.8
    ours = [PanelRow((name,), height, right=_RIGHT) for name in names]
    sheet = Sheet(spec.title, [*rows, *ours], caption(scale, used, missing, notes))
    _draw_groups(sheet.axes[: len(rows)], spec, source, groups)
    panels = [row[0] for row in sheet.axes[len(rows) :]]
    for axes, points in zip(panels, benches.values(), strict=False):
        _draw_lines(axes, spec, points)
        if spec.ratio:
            _write_ratios(axes, _ratios(spec, points))
    if not benches:
        say_missing(panels[0], f"no complete run at {scale} scale")
    return Drawing(sheet, _alt(spec, groups, benches, scale), missing, bool(benches))


def _printed(spec: FigureSpec, source: Source) -> dict[str, Points]:
    """Printed points by the GPU they were printed for."""
    groups: dict[str, Points] = {}
    place = f"Table {spec.table}"  # its rows; what the caption repeats has another place
    for cell in source.cells(spec.table, metric=spec.metric, op="", place=place):
        labels = cell["labels"]
        series = labels.get(spec.by)
        if series in spec.series and spec.x in labels:
            point = Point(float(labels[spec.x]), printed_value(cell))
            points = groups.setdefault(cell["hardware"], {})
            points.setdefault((series, ""), []).append(point)
    return groups


def _measured(spec: FigureSpec, run: Row) -> Points:
    points: Points = {}
    for metric in run["metrics"]:
        labels = metric["labels"]
        chosen = metric["name"] == spec.metric and labels.get(spec.by) in spec.series
        if chosen and all(labels.get(key) == value for key, value in spec.where.items()):
            point = Point(float(labels[spec.x]), metric["value"], metric["low"], metric["high"])
            points.setdefault((labels[spec.by], _way(labels)), []).append(point)
    return {key: sorted(found) for key, found in points.items()}


def _join(held: Points, more: Points) -> None:
    """Add the points of another run; where both have a place, the other's counts."""
    for key, found in more.items():
        by_place = {point.x: point for point in (*held.get(key, ()), *found)}
        held[key] = [by_place[x] for x in sorted(by_place)]


def _way(labels: dict[str, str]) -> str:
    """How a model was run, where that can differ: its dispatch path, or whether it was compiled."""
    path = str(labels.get("path", ""))
    if path != "dense":
        return path
    return "compiled" if "compiled" in labels.get("mode", "") else "eager"


def _printed_rows(groups: list[str]) -> list[PanelRow]:
    if len(groups) <= 1:
        gpu = (groups and groups[0]) or "GPU not stated"
        return [PanelRow((f"Paper, printed: {gpu}",), 1.6, right=_RIGHT)]
    key = PanelRow(("Paper, printed values by GPU",), 0.32, left=0.1, below=0.03)
    pairs = [tuple(groups[start : start + 2]) for start in range(0, len(groups), 2)]
    if len(pairs[-1]) == 1:
        pairs[-1] = (pairs[-1][0], "")
    upper = [PanelRow(pair, 1.15, gap=0.45, below=0.28) for pair in pairs[:-1]]
    return [key, *upper, PanelRow(pairs[-1], 1.15, gap=0.45)]


def _draw_groups(
    rows: list[list[Axes]], spec: FigureSpec, source: Source, groups: dict[str, Points]
) -> None:
    if not groups:
        say_missing(rows[0][0], "no printed values in the database")
        return
    if len(groups) > 1:
        _draw_key(rows.pop(0)[0], spec)
    panels = [axes for row in rows for axes in row]
    everything = [
        point for points in groups.values() for found in points.values() for point in found
    ]
    for axes, points in zip(panels, groups.values(), strict=False):
        for (slug, _), found in points.items():
            style = spec.series[slug]
            axes.plot(
                [point.x for point in found], [point.y for point in found], style.marker, ms=5,
                color=COLORS[style.color], mfc=GROUND, mew=1.3,
            )  # fmt: skip
        _log_log(axes, spec, everything)
    for index, row in enumerate(rows):
        for axes in row[1:]:
            axes.set_ylabel("")
        for axes in row if index < len(rows) - 1 else []:
            axes.set_xlabel("")
    for spare in panels[len(groups) :]:
        spare.set_axis_off()
    if len(groups) == 1:
        (points,) = groups.values()
        _name(panels[0], spec, points)
        if spec.ratio:
            cells = source.cells(spec.table, op="ratio")
            _write_ratios(
                panels[0],
                [(float(cell["labels"][spec.x]), cell["printed"]) for cell in cells
                 if spec.x in cell["labels"]],
            )  # fmt: skip


def _draw_key(axes: Axes, spec: FigureSpec) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 2), ylim=((len(spec.series) + 1) // 2, 0))
    for index, style in enumerate(spec.series.values()):
        color, x, y = COLORS[style.color], index % 2, index // 2 + 0.5
        axes.plot(x + 0.04, y, style.marker, color=color, ms=5, mfc=GROUND, mew=1.3)
        axes.text(x + 0.1, y, style.label, color=color, va="center", size=8)


def _draw_lines(axes: Axes, spec: FigureSpec, points: Points) -> None:
    ways: dict[str, list[str]] = {}
    for slug, way in points:
        ways.setdefault(slug, []).append(way)
    for (slug, way), found in points.items():
        style = spec.series[slug]
        color = COLORS[style.color]
        x = [point.x for point in found]
        axes.plot(
            x, [point.y for point in found], marker=style.marker, color=color, ms=4, linewidth=1.4,
            linestyle=_DASHES[ways[slug].index(way) % len(_DASHES)],
        )  # fmt: skip
        spread = [point for point in found if point.low is not None and point.high is not None]
        axes.vlines(
            [point.x for point in spread], [point.low for point in spread],
            [point.high for point in spread], color=color, linewidth=1,
        )  # fmt: skip
    _log_log(axes, spec, [point for found in points.values() for point in found])
    _name(axes, spec, points)


def _name(axes: Axes, spec: FigureSpec, points: Points) -> None:
    several = {slug for slug, _ in points if sum(slug == other for other, _ in points) > 1}
    items = []
    for (slug, way), found in points.items():
        style, last = spec.series[slug], max(found)
        name = f"{style.label}, {way.replace('_', ' ')}" if slug in several else style.label
        items.append((last.x, last.y, name, COLORS[style.color]))
    label_points(axes, items)


def _log_log(axes: Axes, spec: FigureSpec, points: list[Point]) -> None:
    lengths = sorted({point.x for point in points})
    low, high = min(point.y for point in points), max(point.y for point in points)
    room = (high / low) ** 0.08 * 1.05
    limits = low / room, high * room ** (2 if spec.ratio else 1)
    axes.set(xscale="log", yscale="log", ylim=limits, xlabel=spec.x_label, ylabel=spec.y_label)
    axes.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
    inches = axes.get_window_extent().width / axes.figure.dpi
    log_ticks(axes.xaxis, lengths, room=inches / 0.38)
    log_ticks(axes.yaxis, nice_ticks(*limits))


def _ratios(spec: FigureSpec, points: Points) -> list[tuple[float, str]]:
    over, under = ({p.x: p.y for p in points.get((slug, ""), [])} for slug in spec.ratio)
    return [(x, f"{over[x] / under[x]:.2f}×") for x in sorted(over.keys() & under.keys())]


def _write_ratios(axes: Axes, ratios: list[tuple[float, str]]) -> None:
    for x, text in ratios:
        axes.text(
            x, 0.99, text if text.endswith("×") else f"{text}×", va="top", ha="center", size=7.5,
            transform=axes.get_xaxis_transform(), color=MUTED,
        )  # fmt: skip


def _alt(
    spec: FigureSpec, groups: dict[str, Points], benches: dict[str, Points], scale: str
) -> str:
    def words(points: Points) -> str:
        return "; ".join(
            f"{spec.series[slug].label}{f' ({way})' if way else ''} "
            + ", ".join(f"{figure_text(point.y)} at {short_number(point.x)}" for point in found)
            for (slug, way), found in points.items()
        )

    parts = [f"Paper, {gpu or 'GPU not stated'}: {words(found)}" for gpu, found in groups.items()]
    parts += [f"Ours at {scale} scale, {name}: {words(found)}" for name, found in benches.items()]
    return f"{spec.y_label} by {spec.x_label}. " + (". ".join(parts) or "No values") + "."
