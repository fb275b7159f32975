"""Judge a paper's derived numbers from its own printed ones (`derivations.toml`)."""

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field, model_validator

from mol.base import Frozen, UserError, one_line, read_toml
from mol.paper.cell import Cell
from mol.paper.interval import Interval, evaluate, names, point
from mol.paper.printed import Printed, parse
from mol.paper.reported import Paper

Verdict = Literal[
    "agrees", "agrees only unrounded", "contradicted", "not checkable", "flag", "no flag"
]


class Source(Frozen):
    """A number and where it stands. `exact`: a setting or a count, not a rounded figure."""

    place: str
    printed: str
    exact: bool = False

    @model_validator(mode="after")
    def _check(self):
        parse(self.printed)
        return self

    @property
    def box(self) -> Interval:
        number = parse(self.printed)
        return point(number.value) if self.exact else Interval(number.low, number.high)


class Check(Frozen):
    """One printed number and the expression over others that should give it.

    The number is a cell (`of`), or `place` with `printed`, or, for a statement in words, `place`
    with a `bound` that the expression should meet, such as ">0". Inputs are cells or sources.
    A check without an expression says in `reading` why the number cannot be checked. A flag marks
    a statement that is weaker than its wording; its `bound` is what makes it weak.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    kind: Literal["check", "flag"] = "check"
    of: str = ""
    place: str = ""
    printed: str = ""
    bound: str = ""
    what: str = ""  # what is computed or stated, in our words
    expr: str = ""
    inputs: dict[str, str | Source] = {}
    reading: str = ""  # what a contradiction or a flag means

    @model_validator(mode="after")
    def _check(self):
        targets = [bool(self.of), bool(self.printed), bool(self.bound)]
        in_words = self.what and not self.expr  # a statement that nothing printed can check
        if sum(targets) != 1 and (any(targets) or not in_words):
            raise ValueError("give exactly one of of, printed and bound")
        if bool(self.of) == bool(self.place):
            raise ValueError("place goes with printed or bound, and only with them")
        if self.bound and not (parse(self.bound).bound and self.what):
            raise ValueError('a bound looks like ">0" and needs what')
        if self.kind == "flag" and not (self.bound and self.expr and self.reading):
            raise ValueError("a flag needs bound, expr and reading")
        if not self.expr and not self.reading:
            raise ValueError("a check needs an expr, or a reading that says why it has none")
        if self.printed:
            parse(self.printed)
        missing = set(names(self.expr)) ^ set(self.inputs) if self.expr else set(self.inputs)
        if missing:
            raise ValueError(f"expr and inputs differ in {', '.join(sorted(missing))}")
        return self


class Input(Frozen):
    """An input as the judgement used it."""

    name: str
    place: str
    printed: str
    low: float
    high: float


class Row(Frozen):
    """A judged check. `value` is the expression of the printed inputs as they stand; `low` and
    `high` enclose it over everything their rounding can hide."""

    id: str
    kind: Literal["check", "flag"]
    verdict: Verdict
    place: str
    printed: str  # the printed number, or the bound
    what: str
    expr: str
    inputs: tuple[Input, ...]
    value: float | None
    low: float | None
    high: float | None
    reading: str


def _source(cell: Cell) -> Source:
    """A cell as an input: settings are exact unless printed as approximate or in millions."""
    exact = (
        cell.kind == "setting"
        and cell.unit in ("count", "step", "length", "ratio")
        and cell.printed[0] not in "~≈<"
        and cell.printed[-1] not in "MB"
    )
    return Source(place=cell.place, printed=cell.printed, exact=exact)


def judge(check: Check, cells: dict[str, Cell]) -> Row:
    """Judge one check by interval arithmetic. Raises UserError for an unknown cell and for an
    expression that is not defined over its inputs."""

    def known(cell_id: str) -> Cell:
        cell = cells.get(cell_id)
        if cell is None or cell.number is None:
            raise UserError(
                f"check {check.id}: {cell_id!r} is not a cell of reported.csv with a number"
            )
        return cell

    if check.of:
        cell = known(check.of)
        place, printed, target = cell.place, cell.printed, cell.number
    else:
        place, printed = check.place, check.printed or check.bound
        target = parse(printed) if printed else None
    box, middle, inputs = {}, {}, []
    for name, given in check.inputs.items():
        if isinstance(given, str):
            cell = known(given)
            source, number = _source(cell), cell.number
        else:
            source, number = given, parse(given.printed)
        middle[name] = point(number.value)
        box[name] = middle[name] if source.exact else Interval(number.low, number.high)
        inputs.append(
            Input(
                name=name,
                place=source.place,
                printed=source.printed,
                low=box[name].low,
                high=box[name].high,
            )
        )
    value = span = None
    if check.expr:
        try:
            value, span = evaluate(check.expr, middle).low, evaluate(check.expr, box)
        except ValueError as error:
            raise UserError(f"check {check.id}: {error}") from None
    return Row(
        id=check.id,
        kind=check.kind,
        verdict=_verdict(check, target, value, span),
        place=place,
        printed=printed,
        what=check.what,
        expr=check.expr,
        inputs=tuple(inputs),
        value=value,
        low=span.low if span else None,
        high=span.high if span else None,
        reading=check.reading,
    )


def _verdict(
    check: Check, target: Printed | None, value: float | None, span: Interval | None
) -> Verdict:
    if target is None or value is None or span is None:
        return "not checkable"
    if check.kind == "flag":
        return "flag" if target.prints(value) else "no flag"
    if target.prints(value):
        return "agrees"
    return "agrees only unrounded" if target.meets(*span) else "contradicted"


def load_checks(folder: Path) -> tuple[Check, ...]:
    """Checks of a folder's `derivations.toml`. Raises UserError naming the check at fault."""
    path = Path(folder) / "derivations.toml"
    document = read_toml(path)
    if unknown := set(document) - {"check"}:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}; every entry is [[check]]")
    checks, seen = [], set()
    for number, entry in enumerate(document.get("check", []), 1):
        name = entry.get("id", f"number {number}")
        try:
            check = Check.model_validate(entry)
        except pydantic.ValidationError as error:
            raise one_line(error, f"{path}: check {name}") from None
        if check.id in seen:
            raise UserError(f"{path}: check {name} occurs twice")
        seen.add(check.id)
        checks.append(check)
    return tuple(checks)


def check_paper(paper: Paper) -> list[Row]:
    """Every check of the paper's folder, judged, in the order of the file."""
    cells = {cell.cell_id: cell for cell in paper.cells}
    checks = load_checks(paper.folder)
    try:
        return [judge(check, cells) for check in checks]
    except UserError as error:
        raise UserError(f"{paper.folder / 'derivations.toml'}: {error}") from None
