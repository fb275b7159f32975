"""Print our figures as the paper prints its own."""

import re

_SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9}
_PRINTED = re.compile(r"(?P<whole>\d[\d,]*)(?:\.(?P<decimals>\d+))?(?P<suffix>[KMB])?")


def like(printed: str, value: float) -> str:
    """`value` with the decimals, the thousands separators and the suffix of a printed number:
    like("18,041", 5123.4) is "5,123" and like("84.7M", 1.2e6) is "1.2M". Three significant digits
    where those decimals would leave fewer than two, and for ranges and powers of ten."""
    match = _PRINTED.search(printed)
    plain = match and "10^" not in printed and not re.search(r"\d[KMB]?[-–]\d", printed)
    suffix = (match["suffix"] or "") if plain else ""
    decimals = len(match["decimals"] or "") if plain else 0
    if suffix and abs(value) < 1000:
        suffix, decimals = "", 0
    scaled = value / _SUFFIX.get(suffix, 1.0)
    if abs(scaled) >= 1000 and not suffix:
        text = f"{scaled:,.{min(decimals, 1)}f}"
    elif plain and (not scaled or abs(scaled) >= 10 ** (1 - decimals)):
        text = f"{scaled:.{decimals}f}"
    else:
        text = f"{scaled:.3g}"
    sign = "+" if printed[0] in "+-" and value >= 0 else ""
    tail = re.search(r"(%|×|h| s/s)$", printed)
    return f"{sign}{text}{suffix}{tail[0] if tail else ''}"


def signed(printed: str, difference: float) -> str:
    """A difference in the style of a printed number, always with its sign."""
    text = like(printed.lstrip("+-~≈<"), abs(difference))
    return f"{'-' if difference < 0 else '+'}{text}"


def figure_text(value: float, digits: int = 4) -> str:
    """`digits` significant digits or all before the point; an exponent only far below 1."""
    whole = abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
