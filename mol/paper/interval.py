"""Arithmetic on intervals, for expressions given as text: every number a rounding could hide.

Only the operators and functions below are understood; nothing is ever handed to Python's eval.
"""

import ast
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple


class Interval(NamedTuple):
    """The closed interval of reals from `low` to `high`."""

    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


def point(x: float) -> Interval:
    return Interval(x, x)


def _hull(values: Sequence[float]) -> Interval:
    return Interval(min(values), max(values))


def _add(a: Interval, b: Interval) -> Interval:
    return Interval(a.low + b.low, a.high + b.high)


def _subtract(a: Interval, b: Interval) -> Interval:
    return Interval(a.low - b.high, a.high - b.low)


def _multiply(a: Interval, b: Interval) -> Interval:
    return _hull([x * y for x in a for y in b])


def _divide(a: Interval, b: Interval) -> Interval:
    if b.low <= 0 <= b.high:
        raise ValueError("division by an interval that holds 0")
    return _hull([x / y for x in a for y in b])


def _power(a: Interval, b: Interval) -> Interval:
    if a.low > 0:
        return _hull([x**y for x in a for y in b])
    if b.width or b.low < 0 or b.low % 1:
        raise ValueError("a base that can be 0 or less needs a constant whole exponent")
    ends = _hull([x ** int(b.low) for x in a])
    return Interval(min(0.0, ends.low), ends.high) if a.high >= 0 else ends


def _abs(a: Interval) -> Interval:
    if a.low <= 0 <= a.high:
        return Interval(0.0, max(-a.low, a.high))
    return _hull([abs(a.low), abs(a.high)])


def _increasing(function: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: Interval(function(a.low), function(a.high))


def _hypot(*sides: Interval) -> Interval:
    sizes = [_abs(side) for side in sides]
    return Interval(math.hypot(*(s.low for s in sizes)), math.hypot(*(s.high for s in sizes)))


def _mean(*values: Interval) -> Interval:
    n = len(values)
    return Interval(math.fsum(v.low for v in values) / n, math.fsum(v.high for v in values) / n)


def _deviation(values: Sequence[float]) -> float:
    center = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))


def _stdev(*values: Interval) -> Interval:
    """Sample standard deviation (ddof = 1). It is convex: greatest at a corner of the box; least
    where every value is as near to one common center as its interval allows."""
    if not 2 <= len(values) <= 10:
        raise ValueError("stdev takes 2 to 10 values")

    def nearest(center: float) -> float:
        return _deviation([min(max(center, v.low), v.high) for v in values])

    low, high = min(v.low for v in values), max(v.high for v in values)
    for _ in range(100):  # ternary search on a convex function
        third = (high - low) / 3
        if nearest(low + third) < nearest(high - third):
            high -= third
        else:
            low += third
    return Interval(nearest((low + high) / 2), max(map(_deviation, product(*values))))


def _round_half_away(x: float, digits: int = 0) -> float:
    scaled = abs(x) * 10**digits
    return math.copysign(math.floor(round(scaled, 9) + 0.5) / 10**digits, x)


def _round(a: Interval, digits: Interval = Interval(0.0, 0.0)) -> Interval:  # noqa: B008
    return Interval(*(_round_half_away(x, int(digits.low)) for x in a))


FUNCTIONS: dict[str, Callable[..., Interval]] = {
    "log": _increasing(math.log),
    "exp": _increasing(math.exp),
    "sqrt": _increasing(math.sqrt),
    "abs": _abs,
    "hypot": _hypot,
    "mean": _mean,
    "stdev": _stdev,
    "round": _round,
    "sign": _increasing(lambda x: math.copysign(1.0, x) if x else 0.0),
    "min": lambda *a: Interval(min(x.low for x in a), min(x.high for x in a)),
    "max": lambda *a: Interval(max(x.low for x in a), max(x.high for x in a)),
}
OPERATORS = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.Pow: _power,
}


def _walk(node: ast.AST, box: Mapping[str, Interval]) -> Interval:
    match node:
        case ast.Expression(body=body):
            return _walk(body, box)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return point(float(value))
        case ast.Name(id=name) if name in box:
            return box[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _walk(operand, box)
            return Interval(-inner.high, -inner.low)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_walk(left, box), _walk(right, box))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_walk(arg, box) for arg in args))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed in an expression")


@functools.cache
def _tree(expression: str) -> ast.Expression:
    try:
        return ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{expression!r} is no expression ({reason})") from None


def names(expression: str) -> Counter[str]:
    """How often each variable occurs. Raises ValueError where the text is no expression."""
    nodes = ast.walk(_tree(expression))
    found = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    return Counter({name: n for name, n in found.items() if name not in FUNCTIONS})


def evaluate(expression: str, box: Mapping[str, Interval]) -> Interval:
    """An interval that holds every value of the expression over the box.

    It is exact while each variable occurs once. Interval arithmetic forgets that two occurrences
    are equal, so up to three variables that occur again are cut into pieces and the union taken.
    Raises ValueError for anything but arithmetic, and where it is undefined somewhere in the box.
    """
    repeated = [name for name, n in names(expression).items() if n > 1 and box[name].width]
    tree = _tree(expression)
    pieces = {1: 16, 2: 4, 3: 3}.get(len(repeated), 1)
    cuts = []
    for name in repeated:
        low, step = box[name].low, box[name].width / pieces
        cuts.append([Interval(low + i * step, low + (i + 1) * step) for i in range(pieces)])
    try:
        parts = [
            _walk(tree, {**box, **dict(zip(repeated, corner, strict=True))})
            for corner in product(*cuts)
        ]
    except (OverflowError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r}: {error}") from None
    return Interval(min(p.low for p in parts), max(p.high for p in parts))
