"""The complete runs of a database and their metrics."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import duckdb

from mol.base import UserError
from mol.paper.cell import Cell, Label
from mol.plan.cost import Measured, Shape, Speed, speeds
from mol.plan.experiments import Paper
from mol.plan.select import RUN_SPEC
from mol.report.paired import SCORES, Items
from mol.report.rows import mappings
from mol.report.verdicts import Protocol

PROTOCOL = ("tokenizer", "pad", "layout", "context", "stride", "split")
# Labels of a zero-shot score; where one differs it is another test.
OF_TEST = ("task", "items", "shots", "task_version", "definition", "harness")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One metric of one run."""

    run: dict[str, Any]
    value: float
    unit: str
    stderr: float | None
    low: float | None
    high: float | None
    protocol: dict[str, Any]
    labels: dict[str, Label]

    def alike(self) -> Protocol:
        kind = (self.protocol["tokenizer"] or "").split(":")[0] or None
        return Protocol(
            unit=self.unit, split=self.protocol["split"], tokenizer=kind, pad=self.protocol["pad"]
        )

    def check_alike(self, other: "Reading", what: str) -> None:
        """Raises UserError for perplexities by another protocol, of another text or after another
        number of steps, and for scores of another test. What a record does not say of its text is
        not held against it."""
        self.alike().check_alike(other.alike(), what)
        if unlike := unlike_tests(self.labels, other.labels):
            raise UserError(f"{what}: not compared, {unlike}")
        split = self.protocol["split"]
        if not split:
            return
        hashes = [json.loads(r.run["data"]).get(f"{split}_sha256") for r in (self, other)]
        if None not in hashes and hashes[0] != hashes[1]:
            raise UserError(f"{what}: not compared, unlike {split} text")
        mine, theirs = self.run["steps"], other.run["steps"]
        if mine != theirs:
            raise UserError(f"{what}: not compared, trained for {mine} and {theirs} steps")


def text_of(run: dict[str, Any]) -> str:
    """What a run calls its text, empty where it read none; `OWN_TEXT` begins a reader's own."""
    return json.loads(run["data"]).get("source", "")


def unlike_tests(one: dict[str, Label], other: dict[str, Label]) -> str:
    """In which labels two zero-shot scores are of unlike tests, in words, or ""."""
    return ", ".join(
        f"unlike {key.replace('_', ' ')} ({one.get(key)} and {other.get(key)})"
        for key in OF_TEST
        if one.get(key) != other.get(key)
    )


@dataclass(kw_only=True)
class Runs:
    """Complete runs of a database, indexed by scale and condition."""

    runs: dict[str, dict[str, Any]]
    readings: dict[tuple[str, str, str], list[Reading]]  # by scale, condition, metric
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # Why there is no figure, by condition and task ("": any), where a record says so.
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    # How the paper ran each benchmark and each task: label -> the values it may have.
    protocols: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    beside: dict[str, tuple[str, ...]] = field(default_factory=dict)  # benchmark -> benchmarks
    speeds: dict[Shape, Speed] = field(default_factory=dict)  # of training on a GPU
    # Scores by item, by run, task and metric.
    items: dict[tuple[str, str, str], Items] = field(default_factory=dict)

    def reason(self, cell: Cell) -> str:
        own = (cell.condition, str(cell.labels.get("task", "")))
        return self.reasons.get(own) or self.reasons.get((cell.condition, "")) or ""

    @property
    def scales(self) -> list[str]:
        found = {run["scale"] for run in self.runs.values()}
        return [scale for scale in ("smoke", "proxy", "paper") if scale in found]


def load_runs(database: duckdb.DuckDBPyConnection, plan: Paper) -> Runs:
    """Read the complete runs of the plan, their metrics and their validation curves."""
    cursor = database.execute(
        "SELECT run_id, kind, scale, condition, seed, hardware, hardware_count, device, "
        "memory_gib, wall_s, finished, spec->>'$.data.source.kind' AS source, "
        "spec->>'$.train_run' AS train_run, data, "
        "(spec->>'$.optim.steps')::BIGINT AS steps, spec->>'$.data.tokenizer' AS tokenizer, "
        "(spec->>'$.data.vocab_size')::BIGINT AS vocab_size, notes "
        "FROM runs WHERE status = 'complete' AND run_id NOT IN (SELECT run_id FROM variants) "
        "AND coalesce(train_run, '') NOT IN (SELECT run_id FROM variants)"
    )
    runs = {run["run_id"]: run for run in mappings(cursor)}
    for run in runs.values():
        run["source"] = runs.get(run["train_run"], run)["source"]  # a scored model's own text
    readings: dict[tuple[str, str, str], list[Reading]] = defaultdict(list)
    cursor = database.execute(
        f"SELECT run_id, name, value, unit, stderr, low, high, labels, {', '.join(PROTOCOL)} "
        "FROM metrics ORDER BY ALL"
    )
    for run_id, name, value, unit, stderr, low, high, labels, *protocol in cursor.fetchall():
        if run_id in runs:
            run = runs[run_id]
            readings[run["scale"], run["condition"], name].append(
                Reading(
                    run=run, value=value, unit=unit, stderr=stderr, low=low, high=high,
                    protocol=dict(zip(PROTOCOL, protocol, strict=True)), labels=json.loads(labels),
                )
            )  # fmt: skip
    for run in runs.values():
        if run["kind"] == "train":
            readings[run["scale"], run["condition"], "wall_s"].append(
                Reading(run=run, value=run["wall_s"], unit="s", stderr=None, low=None, high=None,
                        protocol=dict.fromkeys(PROTOCOL), labels={})
            )  # fmt: skip
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    points = database.execute(
        "SELECT run_id, step, value FROM curves WHERE name = 'validation_nll' ORDER BY ALL"
    )
    for run_id, step, value in points.fetchall():
        curves[run_id].append((step, value))
    reasons = _reasons(database, runs)
    protocols = {name: bench.protocol for name, bench in plan.benches.items()}
    protocols |= {task: {"task_version": (own,)} for task, own in plan.task_versions.items()}
    return Runs(
        runs=runs, readings=dict(readings), curves=dict(curves), reasons=reasons,
        items=_items(database), protocols=protocols, speeds=speeds(_measured(database)),
        beside={name: bench.beside for name, bench in plan.benches.items()},
    )  # fmt: skip


def _measured(database: duckdb.DuckDBPyConnection) -> Iterator[Measured]:
    """Training speeds of complete runs on a GPU, variants among them."""
    cursor = database.execute(
        "SELECT spec, labels, value / hardware_count, hardware, run_id FROM metrics "
        "JOIN runs USING (run_id) WHERE name = 'train_tokens_per_s' AND device = 'cuda' "
        "AND status = 'complete' ORDER BY ALL"
    )
    for spec, labels, *speed in cursor.fetchall():
        yield Measured(RUN_SPEC.validate_json(spec), json.loads(labels), Speed(*speed))


def _items(database: duckdb.DuckDBPyConnection) -> dict[tuple[str, str, str], Items]:
    found: dict[tuple[str, str, str], Items] = defaultdict(dict)
    cursor = database.execute(
        "SELECT run_id, task, subtask, doc_id, doc_hash, acc, acc_norm FROM items ORDER BY ALL"
    )
    for run_id, task, subtask, doc_id, doc_hash, *scores in cursor.fetchall():
        for metric, score in zip(SCORES, scores, strict=True):
            if score is not None:
                found[run_id, task, metric][subtask, doc_id, doc_hash] = score
    return dict(found)


def _reasons(
    database: duckdb.DuckDBPyConnection, runs: dict[str, dict[str, Any]]
) -> dict[tuple[str, str], str]:
    """Of runs at the paper's scale that could not be made, and of tasks that a run left out."""
    rows = database.execute(
        "SELECT condition, reason FROM runs WHERE status = 'not run' AND scale = 'paper' "
        "AND reason IS NOT NULL ORDER BY ALL"
    )
    found = {(condition, ""): reason for condition, reason in rows.fetchall()}
    for run in sorted(runs.values(), key=lambda run: run["run_id"]):
        for note in json.loads(run["notes"]):
            left_out = re.fullmatch(r"(\w+): not run, (.+)", note, re.DOTALL)
            if left_out:
                found[run["condition"], left_out[1]] = left_out[2]
    return found
