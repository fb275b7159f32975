"""The figure among the runs that a printed cell, or one side of a claim, asks for."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mol.base import UserError
from mol.paper.cell import Label
from mol.report.number import figure_text
from mol.report.paired import SCORES, Paired, paired, same_items
from mol.report.readings import Reading, Runs

HIGHER_IS_BETTER = {"token/s", "step/s", "ratio", "fraction"}


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


def preferred(named: str, runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs one on the hardware that a cell names, then the latest."""
    return max(runs, key=lambda run: (same_hardware(named, run), run["finished"], run["run_id"]))


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
    run = preferred(query.hardware, (reading.run for reading in options))
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
    if metric not in SCORES or task is None:
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
