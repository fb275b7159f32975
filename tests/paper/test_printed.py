"""A printed string stands for the interval of numbers that round to it."""

import math
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mol.paper.printed import parse


@pytest.mark.parametrize(
    ("text", "value", "low", "high"),
    [
        ("31.2", 31.2, 31.15, 31.25),
        ("+0.90", 0.9, 0.895, 0.905),
        ("-0.16", -0.16, -0.165, -0.155),
        ("84.7M", 84.7e6, 84.65e6, 84.75e6),
        ("102,460", 102460, 102459.5, 102460.5),
        ("5.7×10^-6", 5.7e-6, 5.65e-6, 5.75e-6),
        ("≈0.98×", 0.98, 0.975, 0.985),
        ("~800", 800, 750, 850),
        ("800", 800, 799.5, 800.5),
        ("~24%", 24, 23.5, 24.5),
        ("1.51 s/s", 1.51, 1.505, 1.515),
        ("53.3h", 53.3, 53.25, 53.35),
        ("2048†", 2048, 2047.5, 2048.5),
        ("10K-12K", 11e3, 10e3, 12e3),
        ("5-6K", 5500, 5000, 6000),
        ("~60-65", 62.5, 59.5, 65.5),
    ],
)
def test_reads_what_the_paper_prints(text, value, low, high):
    printed = parse(text)
    assert (printed.value, printed.low, printed.high) == pytest.approx((value, low, high))


def test_kilo_of_a_context_length():
    assert parse("64K-128K", 1024.0).high == 131072


@pytest.mark.parametrize(
    "text", ["", "—", "softmax", "1S+2R", "3/5", "1.2.3", "5-", "12K-10K", "~"]
)
def test_refuses_what_is_no_number(text):
    with pytest.raises(ValueError):
        parse(text)


def test_a_bound_has_one_end():
    printed = parse("<5%")
    assert printed.low == -math.inf
    assert printed.prints(4.999) and not printed.prints(5.0)
    assert printed.meets(3, 9) and not printed.meets(5.1, 9)


def test_ties_round_away_from_zero():
    assert parse("5.1").prints(5.05) and not parse("5.0").prints(5.05)
    assert parse("-5.1").prints(-5.05) and not parse("-5.0").prints(-5.05)


@given(
    st.decimals(min_value=-1000, max_value=1000, allow_nan=False, places=6),
    st.integers(min_value=0, max_value=4),
)
def test_rounding_agrees_with_decimal_arithmetic(x, places):
    text = str(x.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP))
    printed = parse(text)
    if printed.value:  # the sign of a printed zero is lost
        assert printed.prints(float(x))
    assert printed.meets(float(x), float(x))
    step = float(Decimal(1).scaleb(-places))
    assert not printed.prints(float(x) + 1.001 * step)
