"""WikiText-103's raw text made plain: it comes with spaces around punctuation."""

import re

HEADING = re.compile(r"\s*= .* =\s*")
QUOTED = re.compile(r'(^|[\s(])" ([^"]*?) "')
RULES = [
    (re.compile(r" @([-,.])@ "), r"\1"),  # 1 @,@ 000 and well @-@ known
    (re.compile(r" ([,.;:!?%)\]}])"), r"\1"),
    (re.compile(r"([(\[{$£€]) "), r"\1"),
    (re.compile(r" '(s|t|re|ve|ll|d|m)\b"), r"'\1"),
    (re.compile(r"s ' "), "s' "),
    (re.compile(r"(\d) ([–/]) (?=\d)"), r"\1\2"),
    (re.compile(r" n't\b"), "n't"),
]


def plain_line(line: str) -> str | None:
    """A line of the raw corpus as ordinary text; None for headings (" = Title = "), blank lines
    and lines that hold <unk>, which the paper's preparation removes."""
    if not line.strip() or "<unk>" in line or HEADING.fullmatch(line):
        return None
    line = QUOTED.sub(r'\1"\2"', " ".join(line.split()))
    for pattern, plain in RULES:
        line = pattern.sub(plain, line)
    return line
