"""One printed cell: the string, what it means, and which run and metric reproduce it."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mol.base import Frozen
from mol.paper.printed import Printed, parse

# What a cell can be compared with, and in which unit the records hold it. `wall_s` is the
# record's own field; every other name is a metric of it.
METRICS = {
    "nll": "nat/token", "ppl": "ppl/token", "ppl_word": "ppl/word", "bits_per_byte": "bit/byte",
    "params_total": "count", "params_active": "count", "train_tokens_per_s": "token/s",
    "train_steps_per_s": "step/s", "epochs": "epoch", "peak_memory": "byte", "wall_s": "s",
    "inter_token_gap": "token", "coverage": "fraction", "acc": "fraction", "acc_norm": "fraction",
    "prefill_tokens_per_s": "token/s", "decode_ms": "ms/token", "attention_ms": "ms",
    "dispatch_speedup": "ratio", "dispatch_ms": "ms", "max_logit_diff": "logit",
    "max_abs_logit": "logit", "params_reduction": "fraction", "params_per_device": "count",
    "all_reduce_per_stage": "count", "bytes_per_token": "byte", "path_ppl": "ppl/token",
    "path_ppl_change": "fraction",
}  # fmt: skip

CellUnit = Literal[
    "ppl/token", "count", "ratio", "%", "pt", "fraction", "ms", "ms/token", "us/token", "h",
    "GPU-hour", "step", "step/s", "token", "length", "token/s", "epoch", "logit", "GB", "GB/s",
    "TB/s", "TFLOPS", "text",
]  # fmt: skip

Label = str | int | float | bool


def parse_labels(text: str) -> dict[str, Label]:
    """Labels from "length=4096;model=mol-2p08b"; true, false and numbers get their types."""
    labels: dict[str, Label] = {}
    for part in filter(None, text.split(";")):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{part!r} is not key=value")
        if key in labels:
            raise ValueError(f"{key!r} occurs twice")
        if value in ("true", "false"):
            labels[key] = value == "true"
        else:
            labels[key] = int(value) if value.isdecimal() else value
    return labels


class Cell(Frozen):
    """One printed number (or, with unit "text", one printed word) and what reproduces it.

    Operations, with x = `metric` of (`condition`, `labels`) and y = that of `versus`:
    diff x - y; ratio x / y; percent 100 (x / y - 1); crossover the step, or the length, from
    which x is better than y (with unit %: as a share of all steps); limit, without y, the length at
    which x, a peak of memory, is all that the GPU has. For training runs `versus`
    is a condition; for benchmarks it replaces labels, as in "model=dense-1p3b". `seeds` are those
    of both sides together: each side uses the ones it ran with, paired where both have them.
    """

    cell_id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    table: str = Field(pattern=r"^(text|\d+)$")
    row: str
    column: str
    unit: CellUnit
    printed: str = Field(min_length=1)  # as in the paper, but for "-" as the minus sign
    spread: str  # what follows the plus-minus sign, or nothing
    kind: Literal["setting", "count", "derived", "measured"]
    n_seeds: int | None = Field(gt=0)
    place: str = Field(min_length=1)
    experiment: str
    condition: str  # a condition, or a benchmark
    seeds: tuple[int, ...]
    metric: str
    labels: dict[str, Label]
    op: Literal["", "diff", "ratio", "percent", "crossover", "limit"]
    versus: str
    hardware: str  # as printed; empty when the paper names none
    note: str

    @field_validator("printed")
    @classmethod
    def _number(cls, value, info):
        if info.data.get("unit", "text") != "text":
            parse(value)
        return value

    @field_validator("spread")
    @classmethod
    def _deviation(cls, value):
        if value:
            parse(value)
        return value

    @field_validator("n_seeds", mode="before")
    @classmethod
    def _optional(cls, value):
        return value or None

    @field_validator("seeds", mode="before")
    @classmethod
    def _split(cls, value):
        return tuple(filter(None, value.split(";"))) if isinstance(value, str) else value

    @field_validator("labels", mode="before")
    @classmethod
    def _labels(cls, value):
        return parse_labels(value) if isinstance(value, str) else value

    @field_validator("versus")
    @classmethod
    def _versus(cls, value):
        if "=" in value:
            parse_labels(value)
        return value

    @field_validator("metric")
    @classmethod
    def _known(cls, value):
        if value and value not in METRICS:
            raise ValueError(f"{value!r} is not a metric; choose from {', '.join(METRICS)}")
        return value

    @model_validator(mode="after")
    def _check(self):
        if self.number is None and self.kind != "setting":
            raise ValueError(f"a {self.kind} cell cannot have the unit text")
        if self.metric and not self.condition:
            raise ValueError("a metric needs a condition")
        if self.condition and not self.experiment:
            raise ValueError("a condition needs an experiment")
        if bool(self.op and self.op != "limit") != bool(self.versus):
            raise ValueError("op and versus come together, but for op = limit")
        if self.op == "limit" and self.metric != "peak_memory":
            raise ValueError("op = limit goes with metric = peak_memory")
        if self.op and not self.metric:
            raise ValueError("an op needs a metric")
        if self.metric and self.unit not in self._units():
            what = f"{self.op} of {self.metric}" if self.op else self.metric
            allowed = " or ".join(self._units())
            raise ValueError(f"unit {self.unit!r} does not go with {what}, which is in {allowed}")
        return self

    def _units(self) -> tuple[str, ...]:
        """Units that a number of this metric and operation may be printed in."""
        if self.op:
            of_op = {
                "ratio": ("ratio",),
                "percent": ("%",),
                "crossover": ("step", "length", "%"),
                "limit": ("token", "length"),
            }
            if self.op in of_op:
                return of_op[self.op]
        unit = METRICS[self.metric]
        others = {"fraction": ("%", "pt", "fraction"), "s": ("h",), "byte": ("byte", "GB")}
        return others.get(unit, (unit,))

    @property
    def number(self) -> Printed | None:
        """The printed number in the cell's unit; K is 1,024 in lengths. None for text."""
        if self.unit == "text":
            return None
        return parse(self.printed, 1024.0 if self.unit == "length" else 1e3)

    @property
    def deviation(self) -> Printed | None:
        """The printed spread, in the cell's unit."""
        return parse(self.spread) if self.spread else None

    @property
    def per_metric_unit(self) -> float:
        """Cell units in one unit of the metric: 100 for percent of a fraction, 1/3600 for hours."""
        if self.op in ("ratio", "percent", "crossover", "limit"):
            return 1.0
        factors = {
            ("fraction", "%"): 100.0, ("fraction", "pt"): 100.0, ("s", "h"): 1 / 3600,
            ("byte", "GB"): 1e-9,
        }  # fmt: skip
        return factors.get((METRICS.get(self.metric), self.unit), 1.0)

    @property
    def versus_labels(self) -> dict[str, Label]:
        """Labels of the other side of a benchmark's op; empty when `versus` is a condition."""
        return {**self.labels, **parse_labels(self.versus)} if "=" in self.versus else {}
