"""Load what a paper claims: orderings and effects between runs, as data (`claims.toml`)."""

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import Field, model_validator

from mol.base import Frozen, UserError, one_line, read_toml
from mol.paper.cell import METRICS, Label
from mol.paper.printed import Printed, parse
from mol.paper.reported import Paper


class Side(Frozen):
    """One run, or one figure of a benchmark, picked out by labels."""

    condition: str
    labels: dict[str, Label] = {}


class Claim(Frozen):
    """One claim, with s1, s2, ... the `metric` of `sides` (and v1, v2, ... of `versus`).

    ordering: s1, s2, ... are `expected` increasing or decreasing, each a different model.
    monotone: the gaps s1 - v1, s2 - v2, ... (without `versus`, s1, s2, ...) are `expected`
    increasing or decreasing. difference: s1 - s2; ratio: s1 / s2; threshold: s1 alone; crossover:
    the share of training in percent, or with `along = "length"` the length, from which s1 is
    better than s2. These four are `expected` to meet a bound (">0", "<1.05") or to lie in a range
    ("64K-128K"; K is 1,024 in lengths). A side written as text is a condition.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    place: str = Field(min_length=1)
    text: str = Field(min_length=1)  # the claim in our words
    type: Literal["ordering", "difference", "ratio", "crossover", "monotone", "threshold"]
    experiment: str
    metric: str
    sides: tuple[Side, ...]
    versus: tuple[Side, ...] = ()
    labels: dict[str, Label] = {}  # of every side
    along: Literal["training", "length"] | None = None  # of a crossover
    expected: str
    seeds: Literal["paired", "single", "none"]  # none: a benchmark, or counted
    cell: str = ""  # the printed effect, if one is printed
    # Passes over the training text for a claim about the data regime: evaluated only where the
    # runs made as many ("~8", "<1.05").
    epochs: str = ""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_condition(cls, raw):
        if not isinstance(raw, dict):
            return raw
        sides = {
            key: [{"condition": side} if isinstance(side, str) else side for side in raw[key]]
            for key in ("sides", "versus")
            if isinstance(raw.get(key), list)
        }
        return {**raw, **sides}

    @model_validator(mode="after")
    def _check(self):
        if self.metric not in METRICS:
            raise ValueError(f"{self.metric!r} is not a metric")
        least, most = {
            "ordering": (2, 99),
            "monotone": (3, 99),
            "threshold": (1, 1),
        }.get(self.type, (2, 2))
        if not least <= len(self.sides) <= most:
            raise ValueError(f"{self.type} takes {least} sides or more, got {len(self.sides)}")
        if self.versus and (self.type != "monotone" or len(self.versus) != len(self.sides)):
            raise ValueError("versus goes with monotone, one for each side")
        if self.epochs:
            parse(self.epochs)
        if (self.type == "crossover") != (self.along is not None):
            raise ValueError("along goes with crossover, and only with it")
        if self.type in ("ordering", "monotone"):
            if self.expected not in ("increasing", "decreasing"):
                raise ValueError(f"{self.type} expects increasing or decreasing")
        else:
            number = self.target
            if not number.bound and "-" not in self.expected[1:]:
                raise ValueError(f"{self.expected!r} is neither a bound nor a range")
        return self

    @property
    def target(self) -> Printed:
        """The bound or range. Raises ValueError for an ordering or a monotone claim."""
        return parse(self.expected, 1024.0 if self.along == "length" else 1e3)


def load_claims(paper: Paper) -> tuple[Claim, ...]:
    """Claims of a paper's folder. Raises UserError naming the claim at fault, also for names of
    experiments, conditions, benchmarks and cells that are not defined."""
    path = Path(paper.folder) / "claims.toml"
    document = read_toml(path)
    if unknown := set(document) - {"claim"}:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}; every entry is [[claim]]")
    claims, seen = [], set()
    cells = {cell.cell_id for cell in paper.cells}
    for number, entry in enumerate(document.get("claim", []), 1):
        source = f"{path}: claim {entry.get('id', f'number {number}')}"
        try:
            claim = Claim.model_validate(entry)
        except pydantic.ValidationError as error:
            raise one_line(error, source) from None
        if claim.id in seen:
            raise UserError(f"{source}: occurs twice")
        if claim.experiment not in paper.experiments:
            raise UserError(f"{source}: experiment {claim.experiment!r} is not in experiments.toml")
        for side in (*claim.sides, *claim.versus):
            if side.condition not in paper.experiments[claim.experiment]:
                raise UserError(f"{source}: {side.condition!r} is not in {claim.experiment}")
        if claim.cell and claim.cell not in cells:
            raise UserError(f"{source}: cell {claim.cell!r} is not in reported.csv")
        seen.add(claim.id)
        claims.append(claim)
    return tuple(claims)
