"""Printed numbers and the real numbers that would print so: "31.2" is [31.15, 31.25]."""

import math
import re

from mol.base import Frozen

SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9}
NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>\d[\d,]*)(?:\.(?P<decimals>\d+))?(?:×10\^(?P<power>-?\d+))?"
    r" ?(?P<suffix>[KMB])?(?:%|×|h| s/s|†)?"
)


class Printed(Frozen):
    """The number a string prints, and the closed interval of reals that print as that string.

    `bound`: printed as "<5" or ">0", so one end is infinite and the other is excluded.
    """

    value: float
    low: float
    high: float
    bound: bool = False

    model_config = Frozen.model_config | {"allow_inf_nan": True}

    def prints(self, x: float) -> bool:
        """Whether `x` rounds to this string, halves away from zero."""
        x = float(f"{x:.10g}")
        if self.bound:
            return self.low < x < self.high
        if self.low == self.high:
            return x == self.low
        if self.value < 0:
            return self.low < x <= self.high
        return self.low <= x < self.high

    def meets(self, low: float, high: float) -> bool:
        """Whether some number of [low, high] prints so.

        To touch is not to meet: of two adjoining rounding intervals, the common end is in one.
        """
        slack = 1e-9 * max(abs(self.value), abs(low), abs(high))
        overlap = low < self.high - slack and high > self.low + slack
        return overlap or (low == high and self.prints(low))


def _number(text: str, loose: bool, kilo: float, default_suffix: str = "") -> tuple[float, float]:
    """(value, half a unit of the last digit); with `loose`, trailing zeros are not digits."""
    match = NUMBER.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a printed number")
    whole, decimals = match["digits"].replace(",", ""), match["decimals"] or ""
    suffix = match["suffix"] or default_suffix
    scale = 10.0 ** int(match["power"] or 0) * ({**SUFFIX, "K": kilo}[suffix] if suffix else 1.0)
    zeros = len(whole) - len(whole.rstrip("0")) if loose and not decimals and int(whole) else 0
    unit = 10.0 ** (zeros - len(decimals)) * scale
    value = float(f"{match['sign']}{whole}.{decimals or 0}") * scale
    return value, unit / 2


def _decimal(x: float) -> float:
    """An end of an interval as its decimals say, without what binary subtraction adds to them:
    0.0002 - 0.00005 lies above 0.00015, which prints as 0.0002."""
    return float(f"{x:.12g}")


def parse(text: str, kilo: float = 1e3) -> Printed:
    """Read a printed number, such as "+0.90", "~43M", "≈0.98×", "<5%", "5.7×10^-6", "10K-12K".

    `kilo` is what K stands for (1,024 in context lengths). "~" or "≈" makes trailing zeros of a
    whole number insignificant: "~800" is [750, 850]. A range "a-b" is [a, b], widened by half a
    unit when it is approximate; its value is the middle. Raises ValueError on anything else.
    """
    loose, bound = text.startswith(("~", "≈")), text.startswith(("<", ">"))
    body = text[1:] if loose or bound else text
    ends = re.split(r"(?<=[\dKMB])[-–]", body)
    if len(ends) == 2:
        suffix = NUMBER.fullmatch(ends[1])
        shared = (suffix["suffix"] or "") if suffix else ""
        (low, half), (high, other) = (_number(end, loose, kilo, shared) for end in ends)
        if low >= high:
            raise ValueError(f"{text!r} is an empty range")
        half = min(half, other) if loose else 0.0
        return Printed(value=(low + high) / 2, low=low - half, high=high + half)
    value, half = _number(body, loose, kilo)
    if bound:
        ends = (-math.inf, value) if text[0] == "<" else (value, math.inf)
        return Printed(value=value, low=ends[0], high=ends[1], bound=True)
    return Printed(value=value, low=_decimal(value - half), high=_decimal(value + half))
