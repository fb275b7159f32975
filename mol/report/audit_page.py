"""`docs/audit.md`: the present state of the audit as Markdown, from the shipped records alone."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb

from mol.base import write_atomic
from mol.plan.experiments import PAPER
from mol.report.ledger import ledger_rows
from mol.report.markup import markdown, markdown_table
from mol.report.view import SCALES, View, load_views, rows
from mol.report.words import effect_text, load_checks, merged, printed_at, recomputed, sources

Row = dict[str, Any]
KINDS = {
    "measured": "measured, by our runs",
    "count": "counted, from the configurations",
    "derived": "derived, from the paper's other numbers",
}
STATUSES = ("stated", "found", "derived", "guessed")


def write_audit_page(path: Path, records_root: Path, paper_folder: Path = PAPER) -> Path:
    """Write the page from the records below `records_root`; the same for the same records."""
    from mol.store.ingest import build

    with tempfile.TemporaryDirectory() as scratch:
        database = Path(scratch) / "mol.duckdb"
        build(database, Path(scratch) / "no-runs", records_root, paper_folder)
        with duckdb.connect(database, read_only=True) as connection:
            write_atomic(path, audit_page(connection, paper_folder))
    return path


def audit_page(database: duckdb.DuckDBPyConnection, paper_folder: Path = PAPER) -> str:
    """The page as text. No table is wider than six columns."""
    views = load_views(database)
    parts = [
        "# Audit of the paper's numbers",
        "Written by `mol report --audit-page docs/audit.md` from the records that ship in "
        "`results/records/` and from the paper's own numbers (`mol/paper/`); a test fails when it "
        "is out of date. [paper.md](paper.md) says how numbers are checked, "
        "[report.md](report.md) what each verdict means. After a run of your own, "
        "`mol audit` and `paper_tables/index.html` show the same with your figures.",
        "Contents: [verdicts](#verdicts), [shipped records](#shipped-records), "
        "[parameter counts](#parameter-counts), [contradictions](#contradictions), "
        "[wording](#wording-that-its-own-numbers-do-not-bear), [claims](#claims), "
        "[settings](#settings).",
        *_verdicts(views),
        *_records(database, views),
        *_counts(paper_folder),
        *_contradictions(database),
        *_flags(database),
        *_claims(database),
        *_settings(database, paper_folder),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _verdicts(views: list[View]) -> list[str]:
    counted = Counter(
        (view.cell["kind"], view.verdict) for view in views if view.verdict
    ).most_common()
    lines = [
        [KINDS[kind], verdict, str(count)]
        for name in KINDS
        for (kind, verdict), count in counted
        if kind == name
    ]
    measured = [view for view in views if view.cell["kind"] == "measured"]
    names = dict.fromkeys(view.cell["table"] for view in measured)
    by_table = []
    for table in sorted(names, key=lambda name: (not name.isdigit(), name.zfill(3))):
        own = Counter(view.verdict for view in measured if view.cell["table"] == table)
        not_run = own["not run"] + own["not run at paper scale"]
        judged = [own["reproduced"], own["not reproduced"], own["under-powered"]]
        by_table.append(
            [
                f"Table {table}" if table.isdigit() else "in the text",
                *map(str, (*judged, own["not judgeable here"], not_run)),
            ]
        )
    header = ["where", "reproduced", "not reproduced", "under-powered", "not judgeable here",
              "not run"]  # fmt: skip
    return [
        "## Verdicts",
        markdown_table(["numbers", "verdict", "cells"], lines),
        "Measured numbers by place:",
        markdown_table(header, by_table),
    ]


def _records(database: duckdb.DuckDBPyConnection, views: list[View]) -> list[str]:
    found = rows(
        database,
        "SELECT hardware_count, hardware, scale, kind, count(*) AS runs FROM runs "
        "WHERE status = 'complete' GROUP BY ALL ORDER BY ALL",
    )
    if not found:
        text = "None yet, so no number is judged by a run."
        return ["## Shipped records", text]
    machines = [
        [f"{row['hardware_count']} x {row['hardware']}", row["scale"], row["kind"],
         str(row["runs"])]
        for row in found
    ]  # fmt: skip
    lines = [
        [
            f"{view.cell['place']}: {view.cell['row']} {view.cell['column']}".strip(),
            view.reported,
            f"{view.figure(best['scale'])} ({best['scale']})",
            view.difference,
            view.state,
            best["hardware"] or "",
        ]
        for view in views
        if view.cell["kind"] == "measured" and (best := view.best)
    ]
    header = ["number", "reported", "ours (scale)", "difference", "verdict", "machine"]
    return [
        "## Shipped records",
        markdown_table(["machine", "scale", "kind", "runs"], machines),
        "Figures they give, in the paper's order:",
        markdown_table(header, lines) if lines else "None for a printed number.",
    ]


def _counts(folder: Path) -> list[str]:
    if not (folder / "counts.toml").is_file():
        return []
    from mol.model.counts import paper_rows  # imports torch

    groups: dict[tuple, list[Row]] = {}  # an active count is printed under one of two rules
    for row in paper_rows(folder / "counts.toml"):
        if row["printed"]:
            rule = "active" if row["rule"].startswith("active") else row["rule"]
            groups.setdefault(
                (row["configuration"], row["place"], rule, row["printed"]), []
            ).append(row)
    lines = []
    for (configuration, place, rule, printed), found in groups.items():
        agreeing = [row for row in found if row["match"]]
        row = (agreeing or found)[0]
        computed = row["computed"]
        number = f"{computed:,}" if isinstance(computed, int) else f"{computed:.4g}"
        detail = row["rule"].removeprefix("active_").replace("_", " ") if rule == "active" else ""
        answer = ", ".join(filter(None, ["yes" if agreeing else "no", detail]))
        lines.append([configuration, place, rule.replace("_", " "), printed, number, answer])
    header = ["configuration", "place", "count", "printed", "computed", "agrees"]
    agreeing = sum(line[-1].startswith("yes") for line in lines)
    return [
        "## Parameter counts",
        f"{agreeing} of {len(lines)} printed counts follow from the architecture (`mol counts`). "
        "An active count is held against two rules, with and without the weights DeltaNet adds.",
        markdown_table(header, lines),
    ]


def _contradictions(database: duckdb.DuckDBPyConnection) -> list[str]:
    checks = load_checks(database, "contradicted")
    items = []
    for group in merged(checks):
        first = group[0]
        what = f" ({markdown(first['what'])})" if first["what"] else ""
        # A bare name as the expression sets two prints of one thing side by side.
        gives = "" if first["expr"].isidentifier() else f", gives {markdown(recomputed(first))}"
        items.append(
            f"- **{markdown(printed_at(group))}**{what}; against it {markdown(sources(first))}"
            f"{gives}. {markdown(first['reading'])}"
        )
    return [
        "## Contradictions",
        f"{len(checks)} checks in which no rounding of the printed numbers helps. First what is "
        "printed and where, then where the numbers stand that give another value.",
        "\n".join(items) or "None.",
    ]


def _flags(database: duckdb.DuckDBPyConnection) -> list[str]:
    items = [
        f"- **{markdown(check['place'])}**: {markdown(check['reading'])} "
        f"({markdown(check['what'])}: {markdown(recomputed(check))})"
        for check in load_checks(database, "flag")
    ]
    return [
        "## Wording that its own numbers do not bear",
        f"{len(items)} statements weaker than they read, by their own error bars, or set beside "
        "unlike things. In parentheses what was computed.",
        "\n".join(items) or "None.",
    ]


def _claims(database: duckdb.DuckDBPyConnection) -> list[str]:
    claims = rows(database, "SELECT * FROM claim_results ORDER BY experiment, rowid")
    titles = {
        row["experiment"]: row["title"] for row in rows(database, "SELECT * FROM experiments")
    }
    outcomes = Counter((row["scale"], row["outcome"]) for row in claims)
    parts = [
        f"{count} {outcome} at scale {scale}"
        for (scale, outcome), count in sorted(
            outcomes.items(), key=lambda item: (SCALES.index(item[0][0]), item[0][1])
        )
    ]
    sections = [
        "## Claims",
        f"Orderings and effects between the paper's runs: {', '.join(parts) or 'none'}. A claim "
        "that was not run is undecided; the last column says what would decide it at the paper's "
        "scale, in GPU-hours too once a GPU run has measured a throughput.",
    ]
    for experiment in dict.fromkeys(row["experiment"] for row in claims):
        lines = [
            [
                row["text"], row["place"], row["scale"], row["outcome"],
                effect_text(row) or row["needs"] or row["note"] or "",
            ]
            for row in claims
            if row["experiment"] == experiment
        ]  # fmt: skip
        header = ["claim", "place", "scale", "outcome", "effect (95 %), or what decides it"]
        sections += [f"### {experiment} {titles[experiment]}", markdown_table(header, lines)]
    return sections


def _settings(database: duckdb.DuckDBPyConnection, folder: Path) -> list[str]:
    settings = ledger_rows(folder, rows(database, "SELECT * FROM effects ORDER BY rowid"))
    if not settings:
        return []
    names = sorted({name for row in settings for name in row["experiments"]})
    lines = []
    for name in names:
        own = Counter(row["status"] for row in settings if name in row["experiments"])
        lines.append([name, *(str(own[status]) for status in STATUSES)])
    total = Counter(row["status"] for row in settings)
    lines.append(["all", *(str(total[status]) for status in STATUSES)])
    guesses = [
        [row["setting"], _value(row["value"]), ", ".join(row["experiments"]), row["source"],
         row["effect"]]
        for row in settings
        if row["status"] == "guessed"
    ]  # fmt: skip
    return [
        "## Settings",
        "Settings of the runs by how they are known: stated by the paper, found in a public file "
        "of its authors, derived from its numbers, or guessed. A setting that several experiments "
        "share counts in each, and once in the last row. `mol/paper/settings.toml` has every one "
        "with its source, and `index.html` shows them with their experiment.",
        markdown_table(["experiment", *STATUSES], lines),
        "What was guessed, and what another value does where runs measured it: the mean over "
        "pairs of runs that differ in that setting alone, or of one checkpoint by two protocols; "
        "above 0 the value that is used gives the lower loss.",
        markdown_table(["guessed setting", "value", "experiments", "why", "effect"], guesses),
    ]


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
