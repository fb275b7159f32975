"""The complete runs of a database, and the metric of each that a printed cell asks for."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb

from mol.base import UserError
from mol.paper.cell import Cell, Label
from mol.plan.cost import Measured, Shape, Speed, speeds
from mol.plan.experiments import Paper
from mol.plan.select import RUN_SPEC
from mol.report.number import figure_text
from mol.report.paired import Items, Paired, paired, same_items
from mol.report.rows import mappings
from mol.report.verdicts import Protocol

PROTOCOL = ("tokenizer", "pad", "layout", "context", "stride", "split")
HIGHER_IS_BETTER = {"token/s", "step/s", "ratio", "fraction"}
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
        "SELECT run_id, kind, scale, condition, seed, hardware, hardware_count, device, wall_s, "
        "finished, spec->>'$.data.source.kind' AS source, spec->>'$.train_run' AS train_run, data, "
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
    for experiment in plan.experiments.values():
        for task, version in experiment.task_versions.items():
            protocols[task] = {"task_version": (version,)}
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
        for metric, score in zip(("acc", "acc_norm"), scores, strict=True):
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


def matches(reading: Reading, labels: dict[str, Label]) -> bool:
    for key, wanted in labels.items():
        found = reading.protocol.get(key) or reading.labels.get(key)
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


@dataclass(frozen=True, kw_only=True)
class Query:
    """One side of a cell or of a claim. `name` is whose, for messages; no seeds: all there are."""

    name: str
    metric: str
    condition: str
    labels: dict[str, Label]
    seeds: tuple[int, ...] = ()
    hardware: str = ""  # preferred where one seed ran on several machines


def as_printed(runs: Runs, query: Query, readings: list[Reading]) -> tuple[list[Reading], str]:
    """The readings that ran as the paper's did and "", or else all of them and what is other
    about the best. A figure without a label counts as the paper's."""
    wanted = _wanted(runs, query)
    exact = [reading for reading in readings if not _other(reading, wanted)]
    return (exact, "") if exact or not readings else (readings, _other(best(readings), wanted))


def joined(others: Iterable[str]) -> str:
    """Ways in which sides of a comparison ran otherwise than the paper's, in words, or ""."""
    return " and ".join(dict.fromkeys(filter(None, others)))


def _wanted(runs: Runs, query: Query) -> dict[str, tuple[Label, ...]]:
    """The benchmark's or the task's protocol; a query that names a dispatch path narrows it to
    that one."""
    named = {"path": (query.labels["path"],)} if "path" in query.labels else {}
    of = str(query.labels.get("task", query.condition))
    return runs.protocols.get(of, {}) | named


def _other(reading: Reading, wanted: dict[str, tuple[Label, ...]]) -> str:
    return ", ".join(
        f"{key} {reading.labels[key]}"
        for key, allowed in wanted.items()
        if key in reading.labels and reading.labels[key] not in allowed
    )


def read(runs: Runs, scale: str, query: Query) -> tuple[dict[int, Reading], str]:
    """Seed -> its reading, and how it ran otherwise than the paper's ("" where it did not).

    Where one seed ran twice, runs on the named hardware come first, then the latest. Among
    dispatch paths the fastest counts, as in Table 7's caption. Raises UserError when the labels
    do not single out one figure, and for unlike perplexities.
    """
    found, other = as_printed(runs, query, matching(runs, scale, query))
    by_seed: dict[int, list[Reading]] = defaultdict(list)
    for reading in found:
        by_seed[reading.run["seed"]].append(reading)
    chosen = {seed: _single(runs, options, query) for seed, options in sorted(by_seed.items())}
    for reading in chosen.values():
        next(iter(chosen.values())).check_alike(reading, query.name)
    return chosen, other


def beside(runs: Runs, scale: str, query: Query, run: dict[str, Any]) -> str:
    """The best figure of the same case on the same machine by another program than the paper's,
    in words, or ""."""
    wanted = _wanted(runs, query)
    found = []
    for name in (query.condition, *runs.beside.get(query.condition, ())):
        found += [
            reading
            for reading in matching(runs, scale, replace(query, condition=name))
            if machine_of(reading.run) == machine_of(run) and _other(reading, wanted)
        ]
    if not found:
        return ""
    fastest = best(found)
    return f"{figure_text(fastest.value)} {fastest.unit} with {_other(fastest, wanted)}"


def machine_of(run: dict[str, Any]) -> tuple[str, int]:
    return run["hardware"], run["hardware_count"]


def matching(runs: Runs, scale: str, query: Query) -> list[Reading]:
    return [
        reading
        for reading in runs.readings.get((scale, query.condition, query.metric), [])
        if matches(reading, query.labels)
        and (
            not query.seeds or reading.run["kind"] == "bench" or reading.run["seed"] in query.seeds
        )
    ]


def _single(runs: Runs, options: list[Reading], query: Query) -> Reading:
    """The one reading of a seed."""

    def rank(run: dict[str, Any]) -> tuple:
        named = bool(query.hardware) and same_hardware(query.hardware, run)
        return named, run["finished"], run["run_id"]

    run = max((reading.run for reading in options), key=rank)
    options = [reading for reading in options if reading.run is run]
    ways = _wanted(runs, query).keys() | {"path"}  # which of these ran is the best's affair
    labels = {json.dumps({k: v for k, v in o.labels.items() if k not in ways}) for o in options}
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


def pair_of(runs: Runs, metric: str, one: Reading, other: Reading) -> Paired | str:
    """Two zero-shot scores compared item by item, or why they are not: "" for other metrics."""
    task = one.labels.get("task")
    if metric not in ("acc", "acc_norm") or task is None:
        return ""
    sides = [
        runs.items.get((reading.run["run_id"], str(task), metric), {}) for reading in (one, other)
    ]
    if reason := same_items(*sides):
        return reason
    found = paired(*sides)
    # Items of another run of the same name would give another score than the record's.
    if abs(found.value - (one.value - other.value)) > 1e-6:
        return "the items do not give the recorded scores"
    return found
