"""The ledger of settings covers every field of every paper-scale run, with the value it uses."""

from collections import defaultdict

import pytest

from mol.base import UserError
from mol.paper.reported import PAPER
from mol.paper.settings import load_settings
from mol.plan.build import plan
from mol.store.record import Protocol

IDENTITY = {"kind", "scale", "condition", "seed"}


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif value is not None:
        yield path, value


def shown(value):
    """A specification's value as the ledger writes it."""
    if isinstance(value, list):
        return tuple(
            f"{v['top_k']} of {v['n_blocks']}" if isinstance(v, dict) else v for v in value
        )
    return value


@pytest.fixture(scope="module")
def used():
    """(condition, key) -> the value in the paper-scale plan; seeds in the order of the plan."""
    found, seeds = {}, defaultdict(list)
    for planned in plan("paper"):
        spec = planned.spec
        if spec.kind == "train":
            seeds[spec.condition].append(spec.seed)
            for key, value in leaves(spec.model_dump(mode="json")):
                if key not in IDENTITY and (key, value) != ("model.anchor_at", []):
                    found[spec.condition, key] = shown(value)
            padded = spec.data.layout.kind == "padded"
            for part, value in {
                "pad": "masked" if padded else "none",
                "layout": "chunked" if padded else "stream",
                "context": spec.seq_len,
                "stride": spec.seq_len,
                "split": "validation",
                "eos": Protocol.model_fields["eos"].default,
                "text": Protocol.model_fields["text"].default,
            }.items():
                found[spec.condition, f"protocol.{part}"] = value
        elif spec.kind == "bench":
            for key, value in leaves(
                spec.bench.model_dump(mode="json", exclude={"models", "model"})
            ):
                found[spec.condition, f"bench.{key}"] = shown(value)
    return found | {(condition, "seed"): tuple(values) for condition, values in seeds.items()}


@pytest.fixture(scope="module")
def ledger():
    members = defaultdict(set)
    for planned in plan("paper"):
        if planned.spec.kind != "zeroshot":
            for experiment in planned.experiments:
                members[experiment].add((planned.spec.condition, planned.spec.kind))
    rows = defaultdict(list)
    for row in load_settings(PAPER):
        kind = "bench" if (row.key or "").startswith("bench.") else "train"
        names = row.conditions or {
            name for e in row.experiments for name, k in members[e] if k == kind
        }
        for name in names:
            if row.key:
                rows[name, row.key].append(row.value)
    return rows


def test_each_field_of_each_run_is_in_the_ledger_once(used, ledger):
    assert {key: len(ledger[key]) for key in used if len(ledger[key]) != 1} == {}


def test_the_ledger_says_what_the_runs_use(used, ledger):
    wrong = {key: (values[0], used.get(key)) for key, values in ledger.items()
             if used.get(key) != values[0]}  # fmt: skip
    assert wrong == {}
    assert len(used) > 1000


def test_each_experiment_and_status_occurs():
    rows = load_settings(PAPER)
    assert {e for row in rows for e in row.experiments} == {f"E{i:02}" for i in range(1, 14)}
    assert {row.status for row in rows} == {"stated", "found", "derived", "guessed"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[setting]]\n", "unknown key 'setting'"),
        (
            '[[settings]]\nsetting = "lr"\nvalue = 1\nstatus = "stated"\nsource = "4.2"\n',
            "experiments",
        ),
        (
            '[[settings]]\nexperiments = ["E01"]\nsetting = "lr"\nvalue = 1\n'
            'status = "felt"\nsource = "4.2"\n',
            "status",
        ),
    ],
)
def test_a_malformed_row_is_named(tmp_path, text, message):
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_settings(tmp_path)
