"""A figure as a narrow sheet: a title, rows of panels, a caption; sized for a phone's width."""

import io
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from mol.base import write_atomic

WIDTH = 4.0  # inches; on a phone, where it is shown 360 px wide, 8 pt are 10 px
INK, MUTED, RULE, GROUND = "#1b1f24", "#57606a", "#d0d7de", "#ffffff"
# Told apart by lightness and hue under the common color deficiencies, and 4.5 : 1 on white.
COLORS = {
    "blue": "#0060a8",
    "red": "#b8420f",
    "green": "#00735c",
    "ochre": "#7d6200",
    "purple": "#8f3f83",
}
RC = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "svg.fonttype": "none",  # text stays text: selectable, searchable, read aloud
    "svg.hashsalt": "mol",  # element ids do not change from build to build
    "text.parse_math": False,  # a dollar sign in a record is a dollar sign
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "path.simplify": True,
}
_TITLE, _LINE = 0.2, 0.155  # inches a line of title and of caption takes


@dataclass(frozen=True)
class PanelRow:
    """One row of panels of `height` inches, one heading a panel; margins in inches."""

    headings: tuple[str, ...]
    height: float
    left: float = 0.66
    right: float = 0.15
    gap: float = 0.5
    below: float = 0.48

    @property
    def above(self) -> float:
        return 0.13 + 0.14 * max(heading.count("\n") + 1 for heading in self.headings)


class Sheet:
    """Draw into `axes[row][column]`, then `save`. Use inside `matplotlib.rc_context(RC)`."""

    def __init__(self, title: str, rows: list[PanelRow], caption: list[str]):
        heading = textwrap.wrap(title, 42)
        notes = [line for text in caption for line in textwrap.wrap(text, 68)]
        height = (
            0.12
            + _TITLE * len(heading)
            + sum(row.above + row.height + row.below for row in rows)
            + _LINE * len(notes)
            + 0.1
        )
        self.figure = Figure(figsize=(WIDTH, height), dpi=200)
        self._height, cursor = height, 0.12
        for line in heading:
            self._text(cursor, line, size=10, weight="bold")
            cursor += _TITLE
        self.axes: list[list[Axes]] = []
        for row in rows:
            cursor += row.above
            self.axes.append(self._panels(row, cursor))
            cursor += row.height + row.below
        for line in notes:
            self._text(cursor, line, size=7.5, color=MUTED)
            cursor += _LINE

    def _text(self, top: float, text: str, **style) -> None:
        y = 1 - top / self._height
        self.figure.text(0.08 / WIDTH, y, text, va="top", **style)

    def _panels(self, row: PanelRow, top: float) -> list[Axes]:
        count = len(row.headings)
        width = (WIDTH - row.left - row.right - row.gap * (count - 1)) / count
        made = []
        for index, heading in enumerate(row.headings):
            x = row.left + index * (width + row.gap)
            y = self._height - top - row.height
            box = (x / WIDTH, y / self._height, width / WIDTH, row.height / self._height)
            axes = self.figure.add_axes(box)
            shift = 0.08 / WIDTH if index == 0 else box[0]
            self.figure.text(
                shift, box[1] + box[3] + 0.07 / self._height, heading, size=9, weight="bold"
            )
            made.append(axes)
        return made

    def save(self, stem: Path) -> tuple[Path, Path]:
        """Write `stem`.svg and `stem`.png, the same bytes for the same drawing."""
        svg, png = io.BytesIO(), io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(svg, format="svg", metadata=nothing)
        FigureCanvasAgg(self.figure).print_png(png, metadata={"Software": None})
        paths = stem.with_suffix(".svg"), stem.with_suffix(".png")
        # the library's version in a comment would change the bytes from one to the next
        write_atomic(paths[0], re.sub(rb"<!-- Created with .*? -->\n", b"", svg.getvalue()))
        write_atomic(paths[1], png.getvalue())
        return paths


@dataclass(frozen=True)
class Drawing:
    """A drawn sheet, what it shows in words, and the names of what it lacks."""

    sheet: Sheet
    alt: str
    missing: list[str]
    has_runs: bool


def say_missing(axes: Axes, text: str) -> None:
    """An empty panel that says what is not there."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)


def spread(wanted: list[float], gap: float) -> list[float]:
    """The positions nearest to `wanted` that keep `gap` between neighbors, in the same order."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    groups: list[tuple[list[float], int]] = []  # wanted first positions of a group, its size
    for index in order:
        firsts, size = [wanted[index]], 1
        while groups and _first(groups[-1]) + gap * groups[-1][1] > _first((firsts, size)):
            before, count = groups.pop()
            firsts = before + [value - gap * count for value in firsts]
            size += count
        groups.append((firsts, size))
    places = [_first(group) + gap * step for group in groups for step in range(group[1])]
    result = [0.0] * len(wanted)
    for index, place in zip(order, places, strict=True):
        result[index] = place
    return result


def _first(group: tuple[list[float], int]) -> float:
    return sum(group[0]) / len(group[0])


def label_points(axes: Axes, items: list[tuple[float, float, str, str]], size: float = 8) -> None:
    """Write a name beside each (x, y, name, color), right of the panel, without overlaps."""
    box = axes.get_window_extent()
    to_pixel, to_axes = axes.transData, axes.transAxes.inverted()
    points = [to_axes.transform(to_pixel.transform((x, y))) for x, y, _, _ in items]
    gap = size * 1.3 / 72 * axes.figure.dpi / box.height
    heights = spread([point[1] for point in points], gap)
    for point, height, (_, _, name, color) in zip(points, heights, items, strict=True):
        axes.plot(
            [point[0], 1.02, 1.035],
            [point[1], height, height],
            transform=axes.transAxes,
            color=color,
            linewidth=0.5,
            clip_on=False,
        )
        axes.text(
            1.045, height, name, transform=axes.transAxes, va="center", color=color, size=size
        )


def short_number(value: float, _position: int | None = None) -> str:
    """65536 as 64K, 20000 as 20K, 12500 as 12.5K, 6.2 as 6.2."""
    if value >= 1000 and value % 1024 == 0:
        return f"{value / 1024:.0f}K"
    return f"{value / 1000:g}K" if value >= 1000 else f"{value:.4g}"


def log_ticks(axis, values: list[float], room: float = math.inf) -> None:
    """Ticks of a logarithmic axis at `values` and no others; names are left out where more
    than `room` of them would not fit side by side."""
    least = math.log(values[-1] / values[0]) / room if values else 0.0
    named, last = set(), math.inf
    for value in reversed(values):
        if last - math.log(value) >= least:
            named.add(value)
            last = math.log(value)
    axis.set_ticks(values, minor=False)
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda v, _: short_number(v) if v in named else ""))
    axis.set_minor_formatter(NullFormatter())


def nice_ticks(low: float, high: float) -> list[float]:
    """Round values inside [low, high]: powers of ten where three fit, finer steps where not."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [step * 10.0**power for power in range(-4, 10) for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            return inside
    linear = MaxNLocator(4, steps=[1, 2, 2.5, 5]).tick_values(low, high)
    return [float(tick) for tick in linear if low <= tick <= high]
