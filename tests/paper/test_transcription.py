"""Every table typed a second time, row by row, against the cells: none missing, none extra."""

import re
from collections import Counter
from pathlib import Path

import pytest

from mol.paper.reported import load_paper

FOLDER = Path(__file__).parent / "transcription"
# The rates of Table 7 carry words: "36,292 (sparse) / 35,244 (batched)".
RATE = re.compile(r"≈?\d[\d,.]*×?")


def squeeze(text: str) -> str:
    return re.sub(r"\s", "", text)


def typed(table: int) -> Counter:
    """(row, column, string) of each cell of a typed table, white space dropped."""
    lines = (FOLDER / f"table{table:02}.txt").read_text("utf-8").splitlines()
    header, *rows = ([field.strip() for field in line.split("|")] for line in lines)
    found, group = Counter(), ""
    for row in rows:
        if len(row) == 1:  # a GPU of Table 7, with its bandwidth and compute
            group, _, figures = row[0].partition(" (")
            bandwidth, compute = re.findall(r"([\d.]+) (?:GB/s|TB/s|TFLOPS)", figures)
            found[squeeze(group), "HBMbandwidth", bandwidth] += 1
            found[squeeze(group), "bf16compute", compute] += 1
            continue
        keys = 2 if table == 14 else 1
        label = " ".join(row[:keys])
        label = f"{group}: {label}" if group else label
        for column, text in zip(header[keys:], row[keys:], strict=True):
            texts = RATE.findall(text) if table == 7 and text != "—" else [text.strip("()")]
            for text in texts:
                found[squeeze(label), squeeze(column), squeeze(text)] += 1
    return found


def held(table: int) -> Counter:
    """The same of the cells; captions and notes stand outside the table's grid."""
    return Counter(
        (
            squeeze(cell.row),
            squeeze(cell.column),
            squeeze(f"{cell.printed} +- {cell.spread}" if cell.spread else cell.printed),
        )
        for cell in load_paper().cells
        if cell.table == str(table) and cell.row not in ("caption", "note")
    )


@pytest.mark.parametrize("table", range(1, 15))
def test_cells_equal_the_second_transcription(table):
    mine, second = held(table), typed(table)
    assert mine - second == Counter()
    assert second - mine == Counter()
    assert sum(mine.values()) >= 12


def test_a_wrong_digit_would_show():
    second = typed(11)
    assert second["42", "1+3of15", "29.96"] == 1
    assert ("42", "1+3of15", "29.95") not in second
