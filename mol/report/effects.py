"""What one setting does: pairs of figures of the store that differ in that setting alone.

A pair is two training runs of one scale, seed and machine whose specifications differ in one
place; or one checkpoint scored by two protocols that differ in one part (PAD, context, ...).
The figure is the loss on the test split in nat/token, or on the split that was scored.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import duckdb

from mol.base import canonical_json
from mol.plan.experiments import Paper
from mol.plan.variant import planned, settings_of
from mol.report.rows import mappings
from mol.report.verdicts import mean_half_width

Row = dict[str, Any]
PARTS = ("pad", "layout", "context", "stride", "eos", "text")  # of a protocol
OF_RUN = ("run_id", "scale", "condition", "seed", "hardware", "hardware_count")


def effect_rows(database: duckdb.DuckDBPyConnection, paper: Paper) -> Iterator[Row]:
    """Rows of table `effects`, each a pair: of runs, of rules, of a matrix's protocols."""
    cursor = database.execute(
        "SELECT run_id, scale, condition, seed, hardware, hardware_count, code_sha256, spec, "
        "finished FROM runs WHERE kind = 'train' AND status = 'complete' ORDER BY run_id"
    )
    runs = mappings(cursor)
    losses: dict[str, list[Row]] = defaultdict(list)
    cursor = database.execute(
        "SELECT run_id, value, tokenizer, pad, layout, context, stride, split FROM metrics "
        "WHERE name = 'nll' AND split IS NOT NULL ORDER BY ALL"
    )
    for row in mappings(cursor):
        losses[row.pop("run_id")].append(row)
    yield from _between_runs(runs, losses, paper)
    for run in runs:
        yield from _by_two_rules(run, losses[run["run_id"]])
    matrices: dict[str, list[Row]] = defaultdict(list)
    cursor = database.execute(
        "SELECT run_id, value, tokenizer, pad, layout, context, stride, split, eos, text "
        "FROM protocols WHERE name = 'nll' AND value IS NOT NULL ORDER BY ALL"
    )
    for row in mappings(cursor):
        matrices[row["run_id"]].append(row)
    for run in runs:
        yield from _in_matrix(run, matrices[run["run_id"]], losses[run["run_id"]])


def _pair(run: Row, key: str, used: Any, other: Any, effect: float, **more: Any) -> Row:
    return {
        **{name: run[name] for name in OF_RUN if name != "run_id"},
        "key": key, "used": canonical_json(used), "other": canonical_json(other),
        "effect": effect, "unit": "nat/token", "run_id": run["run_id"],
        "other_run": run["run_id"], "note": "", **more,
    }  # fmt: skip


def _main_loss(found: list[Row]) -> Row | None:
    """The loss on the test split, else on another; PAD masked where there is any."""
    real = [row for row in found if row["pad"] != "pad_counted"]
    order = {"test": 0, "validation": 1, "train": 2}
    return min(real, key=lambda row: order[row["split"]], default=None)


def _between_runs(runs: list[Row], losses: dict[str, list[Row]], paper: Paper) -> Iterator[Row]:
    """Pairs of runs. The first has the planned value of its condition; the other's condition may
    have any name, as a reader's own has."""
    settings = {run["run_id"]: settings_of(json.loads(run["spec"])) for run in runs}
    keys = sorted({key for own in settings.values() for key in own})
    # Equal but for one key: equal sums of the other items' hashes. Values of JSON: repr tells them
    # apart as their JSON does, in a tenth of the time.
    total_of: dict[str, int] = {}
    rests: dict[int, list[tuple[str, int]]] = {}  # one entry for all seeds of a condition
    for name, own in settings.items():
        items = {key: hash((key, repr(value))) for key, value in own.items()}
        total = total_of[name] = sum(items.values())
        if total not in rests:
            rests[total] = [(key, total - items.get(key, 0)) for key in keys]
    shared = Counter(rest for own in rests.values() for rest in own)
    alike: dict[tuple, list[Row]] = defaultdict(list)
    for run in runs:
        place = (run["scale"], run["seed"], run["hardware"], run["hardware_count"])
        for rest in rests[total_of[run["run_id"]]]:
            if shared[rest] > 1:
                alike[*place, *rest].append(run)
    plans: dict[tuple[str, str], dict[str, Any] | None] = {}
    for (*_, key, _total), group in alike.items():
        for run in group if len(group) > 1 else ():
            name = run["condition"], run["scale"]
            if name not in plans:
                plans[name] = planned(paper, *name)
            used = settings[run["run_id"]].get(key)
            if plans[name] is None or plans[name].get(key) != used:
                continue
            for other in _latest(group, settings, key):
                value = settings[other["run_id"]].get(key)
                ours, theirs = (_main_loss(losses[r["run_id"]]) for r in (run, other))
                # Tokens of another vocabulary, or another split, are no common unit.
                if value == used or None in (ours, theirs) or not _same_targets(ours, theirs):
                    continue
                mine, its = settings[run["run_id"]], settings[other["run_id"]]
                assert mine | {key: None} == its | {key: None}, "the sums of hashes agree by chance"
                same_code = run["code_sha256"] == other["code_sha256"]
                yield _pair(
                    run, key, used, value, theirs["value"] - ours["value"],
                    other_run=other["run_id"],
                    note="" if same_code else "the two ran by different versions of the code",
                )  # fmt: skip


def _latest(group: list[Row], settings: dict[str, dict[str, Any]], key: str) -> list[Row]:
    """One run a value of `key`, the one that finished last."""
    by_value = {
        canonical_json(settings[run["run_id"]].get(key)): run
        for run in sorted(group, key=lambda run: (run["finished"], run["run_id"]))
    }
    return list(by_value.values())


def _same_targets(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("tokenizer", "pad", "layout", "split"))


def _by_two_rules(run: Row, found: list[Row]) -> Iterator[Row]:
    """Of one run: the loss with PAD counted less with PAD masked, and on the test split less on
    the validation split, which is the one that is used."""
    main = _main_loss(found)
    for part, used, other in (("pad", "masked", "pad_counted"), ("split", "validation", "test")):
        values = {}
        for row in found:
            if main and row | {part: None, "value": None} == main | {part: None, "value": None}:
                values[row[part]] = row["value"]
        if {used, other} <= values.keys():
            yield _pair(run, f"protocol.{part}", used, other, values[other] - values[used])


def _in_matrix(run: Row, rows: list[Row], recorded: list[Row]) -> Iterator[Row]:
    """A checkpoint by another protocol less by the recorded one. Without overlap the stride is the
    context, so the two change together there and count as the context."""
    wanted = _main_loss([row for row in recorded if row["split"] in {r["split"] for r in rows}])
    as_recorded = [r for r in rows if wanted and _protocol(r) == _protocol(wanted)]
    for base in as_recorded[:1]:
        for row in rows:
            mine, theirs = _protocol(row), _protocol(base)
            changed = [part for part in PARTS if mine[part] != theirs[part]]
            if changed == ["context", "stride"] and row["context"] == row["stride"]:
                changed = ["context"]
            # Every padded run records both PAD rules already, over more text.
            if len(changed) == 1 and changed != ["pad"]:
                (part,) = changed
                effect = row["value"] - base["value"]
                yield _pair(run, f"protocol.{part}", theirs[part], mine[part], effect)


def _protocol(row: Row) -> Row:
    own = {"eos": "as_prepared", "text": "prepared"} | row
    return {name: own[name] for name in (*PARTS, "tokenizer", "split")}


def summary(pairs: list[Row]) -> list[Row]:
    """Mean effect, 95 % t interval, n, conditions and machine by scale, machine and other value;
    one pair has no interval. Positive: the value that is used gives the lower loss."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for pair in pairs:
        machine = pair["hardware_count"], pair["hardware"]
        groups[pair["scale"], machine, str(pair["used"]), str(pair["other"])].append(pair)
    found = []
    for (scale, (count, name), _used, _other), group in sorted(groups.items()):
        values = tuple(pair["effect"] for pair in group)
        n, mean, half = len(values), math.fsum(values) / len(values), mean_half_width(values)
        found.append(
            {
                "scale": scale, "hardware": f"{count} x {name}" if count > 1 else name,
                "used": group[0]["used"], "other": group[0]["other"], "effect": mean,
                "low": None if half is None else mean - half,
                "high": None if half is None else mean + half,
                "unit": group[0]["unit"], "n": n,
                "conditions": sorted({pair["condition"] for pair in group}),
                "runs": sorted({pair[key] for pair in group for key in ("run_id", "other_run")}),
                "notes": sorted({pair["note"] for pair in group} - {""}),
            }
        )  # fmt: skip
    return found


def effects_of(setting: Row, pairs: list[Row], paper: Paper) -> list[Row]:
    """Summaries of the pairs that show what a row of the ledger does; empty: not measured."""
    conditions = set(setting["conditions"]) or {
        slug
        for name in setting["experiments"]
        if name in paper.experiments
        for slug in paper.experiments[name].conditions
    }
    return summary(
        [p for p in pairs if p["key"] == setting["key"] and p["condition"] in conditions]
    )
