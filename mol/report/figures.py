"""The figures of `figures.toml`, one set for each scale that has records, as SVG and PNG."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import pydantic

from mol.base import Frozen, one_line, read_toml
from mol.plan.experiments import PAPER
from mol.report.draw_bench import draw_bench
from mol.report.draw_curves import draw_curves
from mol.report.draw_ranking import draw_ranking
from mol.report.sheet import RC, Drawing
from mol.report.source import SCALES, Source

_NEEDS = {
    "curves": ("column", "series", "final_step"),
    "ranking": ("column",),
    "bench": ("series", "metric", "x", "by"),
}


class Fact(Frozen):
    """A step, or a range of steps, that the paper prints in a cell, and what it says of it."""

    cell: str
    text: str


class Series(Frozen):
    label: str
    color: Literal["blue", "red", "green", "ochre", "purple"]
    marker: str


class FigureSpec(Frozen):
    """One entry of `figures.toml`. `table` and `column` choose the printed values."""

    id: str = pydantic.Field(pattern=r"^[a-z0-9_-]+$")
    kind: Literal["curves", "ranking", "bench"]
    title: str
    place: str
    experiment: str
    table: str
    column: str | None = None
    series: dict[str, Series] = {}
    # curves
    final_step: int | None = None
    baseline: str | None = None
    crossing: tuple[str, ...] = ()  # series whose crossing of the baseline is looked for
    facts: tuple[Fact, ...] = ()
    # benchmarks
    metric: str | None = None
    x: str | None = None
    by: str | None = None
    x_label: str = ""
    y_label: str = ""
    where: dict[str, str | int | float | bool] = {}
    ratio: tuple[str, str] | None = None  # series over series, written above the points

    @pydantic.model_validator(mode="after")
    def _check(self):
        for key in _NEEDS[self.kind]:
            if not getattr(self, key):
                raise ValueError(f"figure {self.id!r} is of kind {self.kind}: add {key}")
        return self


class FigureList(Frozen):
    figures: tuple[FigureSpec, ...] = ()


_DRAW: dict[str, Callable[[FigureSpec, Source, str], Drawing]] = {
    "curves": draw_curves,
    "ranking": draw_ranking,
    "bench": draw_bench,
}


@dataclass(frozen=True)
class Figure:
    """A written figure. `alt` says in words what it shows; `missing` what it lacks."""

    spec: FigureSpec
    scale: str
    svg: Path
    png: Path
    alt: str
    missing: tuple[str, ...]
    has_runs: bool


def load_figures(folder: Path = PAPER) -> list[FigureSpec]:
    """The figures of a paper, none if it lists none.

    Raises UserError naming the file, the figure and the key.
    """
    path = folder / "figures.toml"
    if not path.is_file():
        return []
    try:
        return list(FigureList.model_validate(read_toml(path)).figures)
    except pydantic.ValidationError as error:
        raise one_line(error, str(path)) from None


def write_figures(source: Source, out: Path, folder: Path = PAPER) -> list[Figure]:
    """Draw every figure below `out`, named `<id>_<scale>`.

    A database without complete runs gives one set, at the smallest scale, that shows what the
    paper prints and says what is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(RC):
        for scale in source.scales or ["smoke"]:
            for spec in load_figures(folder):
                drawing = _DRAW[spec.kind](spec, source, scale)
                svg, png = drawing.sheet.save(out / f"{spec.id}_{scale}")
                alt = f"{spec.title}. {drawing.alt}"
                missing = tuple(drawing.missing)
                written.append(Figure(spec, scale, svg, png, alt, missing, drawing.has_runs))
    _remove_stale(out, written)
    return written


def _remove_stale(out: Path, written: list[Figure]) -> None:
    """Drop figures of scales whose records are gone."""
    keep = {(figure.spec.id, figure.scale) for figure in written}
    for name in {figure.spec.id for figure in written}:
        for scale in SCALES:
            if (name, scale) not in keep:
                for suffix in (".svg", ".png"):
                    (out / f"{name}_{scale}{suffix}").unlink(missing_ok=True)
