"""The paper's own tables of the database, and what the runs say about its cells and claims."""

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from mol.base import canonical_json
from mol.paper.claims import load_claims
from mol.paper.derivations import check_paper, load_checks
from mol.paper.reported import load_paper
from mol.plan.experiments import Paper, load_experiments
from mol.plan.variant import departures, planned
from mol.report.claims import claim_rows
from mol.report.comparisons import comparison_rows
from mol.report.cost import not_run_rows
from mol.report.effects import effect_rows
from mol.report.judge import verdict_rows
from mol.report.readings import load_runs


def insert(database: duckdb.DuckDBPyConnection, table: str, rows: list[dict]) -> None:
    """Append `rows`, keyed by column, to `table`."""
    if rows:
        # Rows may lack columns; arrow would take those of the first row for all.
        columns = dict.fromkeys(itertools.chain.from_iterable(rows))
        batch = pa.table({key: [row.get(key) for row in rows] for key in columns})  # noqa: F841, found by name in the query
        database.execute(f'INSERT INTO "{table}" BY NAME SELECT * FROM batch')


def insert_paper(database: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Fill the tables that come from the paper's folder alone."""
    runs = load_experiments(folder)
    insert(
        database,
        "conditions",
        [
            {
                "condition": slug,
                "label": condition.label,
                "recipe": condition.recipe,
                "corpus": runs.recipes[condition.recipe].corpus,
                "model": canonical_json(runs.model(slug)),
            }
            for slug, condition in runs.conditions.items()
        ],
    )
    insert(
        database,
        "experiments",
        [
            {"experiment": name, **experiment.model_dump(include={"title", "paper", "note"})}
            for name, experiment in runs.experiments.items()
        ],
    )
    insert(
        database,
        "experiment_conditions",
        [
            {
                "experiment": name,
                "condition": slug,
                "kind": kind,
                "seeds": canonical_json(
                    runs.seeds if slug in experiment.three_seeds else runs.seeds[:1]
                ),
            }
            for name, experiment in runs.experiments.items()
            for kind, slugs in (
                ("train", experiment.conditions),
                ("zeroshot", experiment.conditions if experiment.zero_shot else ()),
                ("bench", experiment.benches),
            )
            for slug in slugs
        ],
    )
    insert(database, "cells", list(_cell_rows(folder)))
    if (folder / "derivations.toml").is_file():
        insert(database, "checks", list(_check_rows(folder)))


def insert_verdicts(database: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Judge the paper's cells and claims by the runs that are in the database already; before
    that, tell a reader's variants from the planned runs, and find what single settings do."""
    paper, plan = load_paper(folder), load_experiments(folder)
    insert(database, "variants", list(_variant_rows(database, plan)))
    insert(database, "effects", list(effect_rows(database, plan)))
    runs = load_runs(database, plan)
    insert(database, "verdicts", list(verdict_rows(paper.cells, runs, plan)))
    insert(database, "comparisons", list(comparison_rows(runs, plan)))
    insert(database, "not_run", list(not_run_rows(runs, folder)))
    if (folder / "claims.toml").is_file():
        insert(database, "claim_results", list(claim_rows(load_claims(paper), runs, plan)))


def _variant_rows(database: duckdb.DuckDBPyConnection, plan: Paper) -> Iterable[dict]:
    runs = database.execute(
        "SELECT run_id, spec FROM runs WHERE kind = 'train' ORDER BY run_id"
    ).fetchall()
    plan_of = functools.cache(functools.partial(planned, plan))
    for run_id, text in runs:
        spec = json.loads(text)
        found = departures(spec, plan_of(spec["condition"], spec["scale"]))
        for key, (wanted, value) in found.items():
            pair = {"planned": wanted, "value": value}
            given = {name: v if v is None else canonical_json(v) for name, v in pair.items()}
            yield {"run_id": run_id, "key": key, **given}


def _cell_rows(folder: Path) -> Iterable[dict]:
    for position, cell in enumerate(load_paper(folder).cells):
        row = cell.model_dump(mode="json")
        seeds, labels = canonical_json(row["seeds"]), canonical_json(row["labels"])
        yield {**row, "position": position, "seeds": seeds, "labels": labels}


def _check_rows(folder: Path) -> Iterable[dict]:
    judged = check_paper(load_paper(folder))
    for check, row in zip(load_checks(folder), judged, strict=True):
        yield {
            **row.model_dump(mode="json", exclude={"id", "inputs"}),
            "check_id": row.id,
            "cell_id": check.of or None,
            "inputs": canonical_json([source.model_dump() for source in row.inputs]),
        }
