"""Load what a paper reports: printed cells, and the names of its experiments and conditions."""

import csv
from pathlib import Path

import pydantic

from mol.base import Frozen, UserError, read_text, read_toml, reason_of
from mol.paper.cell import Cell

PAPER = Path(__file__).parent


class Paper(Frozen):
    """One paper's folder, read and checked. `experiments` maps to their conditions and benches."""

    folder: Path
    cells: tuple[Cell, ...]
    experiments: dict[str, tuple[str, ...]]
    conditions: frozenset[str]
    benches: frozenset[str]
    seeds: tuple[int, ...]

    def cell(self, cell_id: str) -> Cell:
        """The cell of that id. Raises UserError for an unknown one."""
        for cell in self.cells:
            if cell.cell_id == cell_id:
                return cell
        raise UserError(f"{self.folder / 'reported.csv'}: no cell {cell_id!r}")


def _reader(path: Path):
    try:
        return csv.DictReader(read_text(path).splitlines(keepends=True))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as CSV ({reason_of(error)})") from None


def _rows(path: Path, rows: csv.DictReader):
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"{path}:{rows.line_num + 1}: {error}") from None


def read_cells(path: Path) -> tuple[list[Cell], list[int]]:
    """Cells of a `reported.csv` and their line numbers, without a check of names.

    Raises UserError naming the file, the line and the column at fault.
    """
    rows = _reader(path)
    names, expected = rows.fieldnames or [], list(Cell.model_fields)
    for name in expected:
        if name not in names:
            raise UserError(f"{path}:1: column {name!r} is missing")
    for name in names:
        if name not in expected:
            raise UserError(f"{path}:1: column {name!r} is unknown; remove it")
    cells, lines, seen = [], [], {}
    for row in _rows(path, rows):
        line = rows.line_num
        if None in row or None in row.values():
            raise UserError(f"{path}:{line}: not {len(names)} fields; quote commas")
        try:
            cell = Cell.model_validate(row)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            column = first["loc"][0] if first["loc"] else "whole line"
            raise UserError(f"{path}:{line}: column {column!r}: {first['msg']}") from None
        if cell.cell_id in seen:
            again = f"{cell.cell_id!r} is also on line {seen[cell.cell_id]}"
            raise UserError(f"{path}:{line}: column 'cell_id': {again}")
        seen[cell.cell_id] = line
        cells.append(cell)
        lines.append(line)
    return cells, lines


def _check_names(paper: Paper, lines: list[int]) -> None:
    known = paper.conditions | paper.benches
    for cell, line in zip(paper.cells, lines, strict=True):
        wrong = None
        if cell.experiment and cell.experiment not in paper.experiments:
            wrong = "experiment", cell.experiment, "experiments.toml"
        elif cell.condition and cell.condition not in known:
            wrong = "condition", cell.condition, "conditions.toml or a bench of experiments.toml"
        elif cell.condition and cell.condition not in paper.experiments[cell.experiment]:
            wrong = "condition", cell.condition, f"experiment {cell.experiment}"
        elif cell.versus and "=" not in cell.versus and cell.versus not in paper.conditions:
            wrong = "versus", cell.versus, "conditions.toml"
        elif set(cell.seeds) - set(paper.seeds):
            wrong = "seeds", sorted(set(cell.seeds) - set(paper.seeds)), "seeds of experiments.toml"
        if wrong:
            column, value, where = wrong
            path = paper.folder / "reported.csv"
            raise UserError(f"{path}:{line}: column {column!r}: {value!r} is not in {where}")


def load_paper(folder: Path = PAPER) -> Paper:
    """Read `reported.csv`, `conditions.toml` and `experiments.toml` of a folder.

    Raises UserError naming file, line and column (or key) for anything malformed, for a repeated
    cell, and for a name of an experiment, condition, benchmark, seed or metric that is not defined.
    """
    folder = Path(folder)
    conditions = read_toml(folder / "conditions.toml").get("conditions", {})
    plan = read_toml(folder / "experiments.toml")
    cells, lines = read_cells(folder / "reported.csv")
    try:
        paper = Paper(
            folder=folder,
            cells=tuple(cells),
            experiments={
                name: (*entry.get("conditions", ()), *entry.get("benches", ()))
                for name, entry in plan.get("experiments", {}).items()
            },
            conditions=frozenset(conditions),
            benches=frozenset(plan.get("benches", {})),
            seeds=tuple(plan.get("seeds", ())),
        )
    except (pydantic.ValidationError, AttributeError, TypeError) as error:
        raise UserError(f"{folder / 'experiments.toml'}: {' '.join(str(error).split())}") from None
    _check_names(paper, lines)
    return paper
