"""Interval arithmetic holds the value of any expression at any point of its box."""

import math
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from mol.paper.interval import Interval, evaluate

NAMES = ("a", "b", "c")
CALLS = {
    "abs": (1, abs),
    "mean": (3, lambda *x: statistics.fmean(x)),
    "hypot": (2, math.hypot),
    "min": (3, min),
    "max": (2, max),
    "stdev": (3, lambda *x: statistics.stdev(x)),
    "sqrt": (1, math.sqrt),
    "log": (1, math.log),
    "exp": (1, math.exp),
    "sign": (1, lambda x: (x > 0) - (x < 0)),
}


def grow(inner):
    binary = st.tuples(st.sampled_from("+-*/"), inner, inner).map(
        lambda t: f"({t[1]} {t[0]} {t[2]})"
    )
    power = st.tuples(inner, st.integers(0, 3)).map(lambda t: f"({t[0]}) ** {t[1]}")
    calls = st.sampled_from(sorted(CALLS)).flatmap(
        lambda name: st.lists(inner, min_size=CALLS[name][0], max_size=CALLS[name][0]).map(
            lambda args: f"{name}({', '.join(args)})"
        )
    )
    return binary | power | calls | inner.map(lambda text: f"-({text})")


numbers = st.integers(0, 20).map(str) | st.decimals(0, 9, places=2).map(str)
expressions = st.recursive(st.sampled_from(NAMES) | numbers, grow, max_leaves=6)


@st.composite
def boxes(draw):
    """Three intervals and a point inside each."""
    box, point = {}, {}
    for name in NAMES:
        low, high = sorted(draw(st.tuples(st.floats(-9, 9), st.floats(-9, 9))))
        box[name] = Interval(low, high)
        point[name] = min(high, max(low, low + draw(st.floats(0, 1)) * (high - low)))
    return box, point


@settings(max_examples=400, deadline=None)
@given(expressions, boxes())
def test_any_expression_is_enclosed(expression, drawn):
    box, point = drawn
    try:
        found = evaluate(expression, box)
    except ValueError:
        return  # undefined somewhere in the box, and said so
    assert found.low <= found.high
    functions = {name: function for name, (_, function) in CALLS.items()}
    value = eval(expression, {"__builtins__": {}}, functions | point)
    size = max(1.0, *(abs(x) for x in (value, *found)), *(x * x for x in point.values()))
    assert found.low - 1e-6 * size <= value <= found.high + 1e-6 * size
