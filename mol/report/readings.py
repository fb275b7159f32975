"""The complete runs of a database, and the metric of each that a printed cell asks for."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import duckdb

from mol.base import UserError
from mol.paper.cell import Cell, Label
from mol.report.verdicts import Protocol

PROTOCOL = ("tokenizer", "pad", "layout", "context", "stride", "split")
HIGHER_IS_BETTER = {"token/s", "step/s", "ratio", "fraction"}
# The paper's dispatch paths; "sparse" launches block by block, which the benchmark calls loop.
PAPER_PATHS = {"dense", "loop", "batched"}
PATH_NAMES = {"sparse": "loop", "batched_sparse": "batched"}


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


@dataclass(kw_only=True)
class Runs:
    """Complete runs of a database, indexed by scale and condition."""

    runs: dict[str, dict[str, Any]]
    readings: dict[tuple[str, str, str], list[Reading]]  # by scale, condition, metric
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # Why there is no figure, by condition and task ("": any), where a record says so.
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def reason(self, cell: Cell) -> str:
        own = (cell.condition, str(cell.labels.get("task", "")))
        return self.reasons.get(own) or self.reasons.get((cell.condition, "")) or ""

    @property
    def scales(self) -> list[str]:
        found = {run["scale"] for run in self.runs.values()}
        return [scale for scale in ("smoke", "proxy", "paper") if scale in found]


def load_runs(database: duckdb.DuckDBPyConnection) -> Runs:
    """Read the complete runs, their metrics and their validation curves."""
    cursor = database.execute(
        "SELECT run_id, kind, scale, condition, seed, hardware, hardware_count, device, wall_s, "
        "finished, spec->>'$.data.source.kind' AS source, spec->>'$.train_run' AS train_run, data, "
        "(spec->>'$.optim.steps')::BIGINT AS steps, spec->>'$.data.tokenizer' AS tokenizer, "
        "(spec->>'$.data.vocab_size')::BIGINT AS vocab_size, notes "
        "FROM runs WHERE status = 'complete'"
    )
    columns = [column[0] for column in cursor.description]
    runs = {row[0]: dict(zip(columns, row, strict=True)) for row in cursor.fetchall()}
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
    return Runs(runs=runs, readings=dict(readings), curves=dict(curves), reasons=reasons)


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


def matches(reading: Reading, labels: dict[str, Label]) -> bool:
    for key, wanted in labels.items():
        found = reading.protocol[key] if key in PROTOCOL else reading.labels.get(key)
        if key != "path" and (found is None or str(found).lower() != str(wanted).lower()):
            return False
    # A padded run is read with PAD masked: the paper does not state its rule, ours must be one.
    return "pad" in labels or reading.protocol["pad"] != "pad_counted"


def gpu_name(name: str) -> str:
    """A GPU's name in one spelling, so that a printed and a reported one can be compared."""
    words = name.lower().replace("-", " ").split()
    words = [word for word in words if word not in ("nvidia", "geforce", "tesla")]
    # The SXM card reports its memory instead of its form.
    return {"h100 80gb hbm3": "h100 sxm 80gb"}.get(" ".join(words), " ".join(words))


def same_hardware(printed: str, run: dict[str, Any]) -> bool:
    """Whether a run used the GPUs that a cell names, such as "4× H200 NVL"."""
    count, times, name = printed.partition("×")
    if not times:
        count, name = "1", printed
    return gpu_name(name) == gpu_name(run["hardware"]) and int(count) == run["hardware_count"]


def by_path(readings: list[Reading], wanted: Label | None) -> tuple[list[Reading], bool]:
    """Readings of the wanted dispatch path (of any of the paper's where none is wanted), or else
    of the paths there are; and whether those are others than the paper's."""
    if not any("path" in reading.labels for reading in readings):
        return readings, False
    allowed = {PATH_NAMES.get(str(wanted), str(wanted))} if wanted else PAPER_PATHS
    exact = [
        reading
        for reading in readings
        if reading.labels.get("path") in allowed and not _is_compiled(reading)
    ]
    return (exact, False) if exact else (readings, True)


def _is_compiled(reading: Reading) -> bool:
    """Whether a dense model ran compiled or as a CUDA graph, which its run's notes say; the paper
    runs eagerly. The block loop is never compiled."""
    dense = reading.labels.get("path") == "dense"
    return dense and bool(re.search(r"\blayers compiled\b|CUDA graph", reading.run["notes"]))


@dataclass(frozen=True, kw_only=True)
class Query:
    """One side of a cell or of a claim. `name` is whose, for messages; no seeds: all there are."""

    name: str
    metric: str
    condition: str
    labels: dict[str, Label]
    seeds: tuple[int, ...] = ()
    hardware: str = ""  # preferred where one seed ran on several machines


def read(runs: Runs, scale: str, query: Query) -> tuple[dict[int, Reading], bool]:
    """Seed -> its reading, and whether the dispatch path is another than the paper's.

    Where one seed ran twice, runs on the named hardware come first, then the latest. Among
    dispatch paths the fastest counts, as in Table 7's caption. Raises UserError when the labels
    do not single out one figure, and for unlike perplexities.
    """
    found = [
        reading
        for reading in runs.readings.get((scale, query.condition, query.metric), [])
        if matches(reading, query.labels)
        and (
            not query.seeds or reading.run["kind"] == "bench" or reading.run["seed"] in query.seeds
        )
    ]
    found, other_path = by_path(found, query.labels.get("path"))
    by_seed: dict[int, list[Reading]] = defaultdict(list)
    for reading in found:
        by_seed[reading.run["seed"]].append(reading)
    chosen = {seed: _single(options, query) for seed, options in sorted(by_seed.items())}
    for reading in chosen.values():
        next(iter(chosen.values())).alike().check_alike(reading.alike(), query.name)
    return chosen, other_path


def _single(options: list[Reading], query: Query) -> Reading:
    """The one reading of a seed."""

    def rank(run: dict[str, Any]) -> tuple:
        named = bool(query.hardware) and same_hardware(query.hardware, run)
        return named, run["finished"], run["run_id"]

    run = max((reading.run for reading in options), key=rank)
    options = [reading for reading in options if reading.run is run]
    labels = {json.dumps({k: v for k, v in o.labels.items() if k != "path"}) for o in options}
    protocols = {tuple(option.protocol.values()) for option in options}
    if len(labels) > 1 or len(protocols) > 1:
        raise UserError(
            f"{query.name}: {len(options)} figures of {run['run_id']} match {query.metric} "
            f"{query.labels}; name more labels in the paper's data"
        )
    return best(options)


def best(readings: list[Reading]) -> Reading:
    higher = readings[0].unit in HIGHER_IS_BETTER
    return (max if higher else min)(readings, key=lambda reading: reading.value)
