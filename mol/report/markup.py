"""Escaped Markdown, LaTeX and CSV. What a record or a source's name holds is not trusted."""

import csv
import io
import re
import unicodedata

_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "_": r"\_", "%": r"\%", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "Δ": r"$\Delta$", "×": r"$\times$", "±": r"$\pm$", "†": r"\dag{}", "≈": r"$\approx$",
    "—": "---", "–": "--", "≤": r"$\leq$", "≥": r"$\geq$", "τ": r"$\tau$", "µ": r"$\mu$",
    "σ": r"$\sigma$", "→": r"$\to$",
}  # fmt: skip

# Characters that turn the reading direction of what follows them, as their own escapes.
TURNS = {
    code: f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"  # how a cell begins that a spreadsheet computes


def _clean(text: str) -> str:
    """One line without control characters or such as turn the reading direction."""
    visible = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in text)
    return " ".join(visible.split())


def markdown(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&!$])", r"\\\1", _clean(text))


def tex(text: str) -> str:
    """Text for one cell of a LaTeX tabular; letters outside ASCII that have no command here
    stay, so the file wants a UTF-8 engine."""
    return "".join(_TEX.get(c, c) for c in _clean(text))


def csv_cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    text = _clean(text)
    number = re.fullmatch(r"[-+]?[\d.,]+(e-?\d+)?[%×hKMB]?( \([-+\d., a-z%]*\))?", text)
    return f"'{text}" if text.startswith(tuple(FORMULA)) and not number else text


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    body = [[markdown(cell) for cell in row] for row in rows]
    escaped = [[markdown(cell) for cell in lines[0]], lines[1], *body]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped) + "\n"


def tex_table(header: list[str], rows: list[list[str]], caption: str) -> str:
    body = [" & ".join(map(tex, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{tex(caption)}}}",
            rf"\begin{{tabular}}{{{'l' * len(header)}}}",
            r"\hline",
            " & ".join(map(tex, header)) + r" \\",
            r"\hline",
            *body,
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def csv_text(header: list[str], rows: list[list[str]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[csv_cell(cell) for cell in row] for row in rows])
    return stream.getvalue()
