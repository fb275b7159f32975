"""The effect of a setting: from two runs, from two rules for one run, from a protocol matrix."""

import json
import math

import duckdb
import pytest
from made_up_paper import write_paper
from synthetic import CPU, H200, curve_of, record_of, train_metrics, write_run, write_train

from mol.plan.build import plan
from mol.plan.experiments import PAPER, load_experiments
from mol.plan.variant import departures, planned
from mol.report.effects import summary
from mol.report.ledger import ledger_rows
from mol.report.source import Source
from mol.store.ingest import build
from mol.store.matrix import Matrix, MatrixRow, save_matrix
from mol.store.record import Protocol

T2 = 4.302653  # 97.5 % of t with two degrees of freedom
CHUNKED = {
    "tokenizer": "bpe:222222222222", "pad": "masked", "layout": "chunked", "context": 63,
    "stride": 63, "split": "test",
}  # fmt: skip


def changed(spec, **fields):
    """The specification with `layer.weights_over="all"`, `model.rope_base=1.0`, ... changed."""
    raw = spec.model_dump(mode="json")
    for place, value in fields.items():
        *path, last = place.split(".")
        inner = raw
        for name in path:
            inner = inner[name]
        inner[last] = value
    return type(spec).model_validate(raw)


@pytest.fixture
def place(tmp_path):
    class Place:
        runs = tmp_path / "runs"
        specs = [p.spec for p in plan("smoke") if p.spec.kind == "train"]

        def of(self, condition):
            return [spec for spec in self.specs if spec.condition == condition]

        def effects(self):
            assert build(tmp_path / "db", self.runs, tmp_path / "records", PAPER) == []
            return Source(tmp_path / "db").table("effects")

        def source(self):
            return Source(tmp_path / "db")

        def ledger(self, key, experiment):
            rows = ledger_rows(PAPER, self.effects())
            (row,) = [
                r
                for r in rows
                if (r["key"], r["status"]) == (key, "guessed")
                and experiment in r["experiments"]
                and (not r["conditions"] or "mol-top3" in r["conditions"])
            ]
            return row["effect"]

    return Place()


def test_three_pairs_of_runs_give_the_effect_and_its_interval_by_hand(place):
    effects = (0.02, 0.03, 0.07)
    for spec, effect in zip(place.of("mol-top3"), effects, strict=True):
        write_train(place.runs, spec, 3.5)
        over_all = changed(spec, **{"model.layer.weights_over": "all"})
        write_train(place.runs, over_all, 3.5 + effect)
    pairs = [p for p in place.effects() if p["key"] == "model.layer.weights_over"]
    assert sorted(p["effect"] for p in pairs) == pytest.approx(effects)
    assert {(p["used"], p["other"], p["unit"]) for p in pairs} == {("selected", "all", "nat/token")}
    (found,) = summary(pairs)
    half = T2 * math.sqrt(sum((e - 0.04) ** 2 for e in effects) / 2) / math.sqrt(3)
    assert found["effect"] == pytest.approx(0.04)
    assert (found["low"], found["high"]) == pytest.approx((0.04 - half, 0.04 + half), rel=1e-5)
    assert (found["n"], found["hardware"], found["conditions"]) == (3, "Made-up CPU", ["mol-top3"])
    words = place.ledger("model.layer.weights_over", "E05")
    assert words.startswith("selected to all: +0.0400 nat/token (")
    assert words.endswith("n = 3 of mol-top3, smoke, Made-up CPU")


@pytest.mark.parametrize(
    "place_in_spec, value",
    [
        ("model.layer.divide_by_k", False),
        ("model.layer.shared_weight", "unit"),
        ("optim.min_lr_ratio", 0.1),
        ("optim.clip", 0.5),
        ("model.layer.rank1.cosine", "first"),
        ("optim.balance_alpha", 0.01),
    ],
)
def test_any_single_field_is_found_without_being_named(place, place_in_spec, value):
    (spec,) = place.of("rank1-k18")
    write_train(place.runs, spec, 3.5)
    write_train(place.runs, changed(spec, **{place_in_spec: value}), 3.4)
    (pair,) = [p for p in place.effects() if not p["key"].startswith("protocol.")]
    assert (pair["key"], pair["other"]) == (place_in_spec, value)
    assert pair["effect"] == pytest.approx(-0.1)
    (found,) = summary([pair])
    assert (found["low"], found["high"], found["n"]) == (None, None, 1)


def test_what_is_no_pair(place):
    """Two fields, two seeds, two machines, another vocabulary; a variant against a variant."""
    first, second, _ = place.of("mol-top3")
    write_train(place.runs, first, 3.5)
    two = {"model.layer.weights_over": "all", "optim.clip": 0.5}
    write_train(place.runs, changed(first, **two), 3.4)
    write_train(place.runs, changed(second, **{"optim.clip": 0.5}), 3.4)
    write_train(place.runs, changed(first, **{"optim.clip": 2.0}), 3.4, hardware=H200)
    spec = changed(first, **{"optim.betas": [0.8, 0.9]})
    metrics = [
        m.model_copy(update={"protocol": m.protocol.model_copy(update={"tokenizer": "bpe:3"})})
        if m.protocol
        else m
        for m in train_metrics(spec, 3.4)
    ]
    write_run(place.runs, record_of(spec, metrics), curve_of(spec, 3.4))
    assert [p for p in place.effects() if not p["key"].startswith("protocol.")] == []
    assert place.ledger("model.layer.weights_over", "E05") == "not measured"


def test_what_the_paper_states_has_an_effect_where_a_run_was_made_to_tell(place):
    spec = place.of("mol-top3")[0]
    write_train(place.runs, spec, 3.5)
    write_train(place.runs, changed(spec, **{"condition": "mine", "optim.clip": 0.5}), 3.7)
    write_train(place.runs, changed(spec, **{"model.layer.divide_by_k": False}), 3.4)
    rows = {r["key"]: r for r in ledger_rows(PAPER, place.effects()) if r["status"] == "stated"}
    assert rows["model.layer.divide_by_k"]["effect"].startswith("true to false: -0.1000 nat/token")
    assert {row["effect"] for key, row in rows.items() if key != "model.layer.divide_by_k"} == {""}


def test_a_variant_under_a_name_of_its_own_is_a_pair_too(place):
    spec = place.of("mol-top3")[0]
    write_train(place.runs, spec, 3.5)
    own = changed(spec, **{"condition": "mine", "model.layer.weights_over": "all"})
    write_train(place.runs, own, 3.6)
    (pair,) = [p for p in place.effects() if not p["key"].startswith("protocol.")]
    assert (pair["condition"], pair["other_run"]) == ("mol-top3", own.run_id)
    assert place.source().variants == {}


def test_a_variant_judges_nothing_and_is_drawn_nowhere(place):
    spec = place.of("mol-top3")[0]
    write_train(place.runs, spec, 3.5)
    variant = changed(spec, **{"model.layer.weights_over": "all"})
    write_train(place.runs, variant, 2.0)
    place.effects()
    source = place.source()
    assert source.variants == {variant.run_id: "model.layer.weights_over = all, planned selected"}
    assert [run["run_id"] for run in source.complete("smoke", "train", "mol-top3")] == [spec.run_id]
    behind = {
        run for view in source.views for row in view.rows.values() for run in row["runs"] or ()
    }
    assert spec.run_id in behind and variant.run_id not in behind


def test_departures_spare_the_source_and_at_small_scale_the_length():
    paper = load_experiments()
    for scale, steps in (("smoke", []), ("paper", ["optim.steps"])):
        spec = next(p.spec for p in plan(scale) if p.spec.condition == "mol-top3")
        wanted = planned(paper, spec.condition, scale)
        assert departures(spec.model_dump(mode="json"), wanted) == {}
        local = {"kind": "file", "train": "a.txt"}
        own = changed(spec, **{"data.source": local, "optim.steps": 2000, "evaluation.every": 7})
        assert list(departures(own.model_dump(mode="json"), wanted)) == steps
    mine = changed(spec, **{"condition": "mine"})
    assert departures(mine.model_dump(mode="json"), planned(paper, "mine", "paper")) == {}


def test_every_padded_run_shows_what_the_pad_rule_does(place):
    conditions = ("mol-top3", "dense-softmax-85m", "sparse-3of5")
    losses = dict(zip(conditions, (3.2, 3.6, 4.0), strict=True))
    for condition, nll in losses.items():
        write_train(place.runs, place.of(condition)[0], nll)
    write_train(place.runs, place.of("dense-1p3b")[0], 3.0)  # packed: no PAD, no pair
    pairs = [p for p in place.effects() if p["key"] == "protocol.pad"]
    # The made-up record counts PAD at three quarters of the masked loss.
    assert {p["condition"]: p["effect"] for p in pairs} == pytest.approx(
        {condition: -0.25 * nll for condition, nll in losses.items()}
    )
    assert all(p["run_id"] == p["other_run"] for p in pairs)
    half = T2 * 0.1 / math.sqrt(3)
    words = place.ledger("protocol.pad", "E05")
    assert words == (
        f"masked to pad_counted: -0.9000 nat/token ({-0.9 - half:.3g} to {-0.9 + half:.3g}), "
        "n = 3 of 3 conditions, smoke, Made-up CPU"
    )


def test_a_protocol_matrix_shows_context_stride_and_layout(place):
    spec = place.of("mol-top3")[0]
    record = record_of(spec, train_metrics(spec, 3.5))
    folder = write_run(place.runs, record, curve_of(spec, 3.5))

    def row(value, name="nll", **protocol):
        unit = {"nll": "nat/token", "ppl": "ppl/token"}[name]
        return MatrixRow(
            name=name, value=value, unit=unit, n=9, protocol=Protocol(**CHUNKED | protocol)
        )

    rows = [
        row(3.6), row(2.7, pad="pad_counted"), row(36.6, "ppl"), row(3.4, stride=7),
        row(3.9, context=31, stride=31), row(3.8, context=31, stride=7),
        row(3.3, layout="stream", pad="none"), row(3.5, text="raw"),
    ]  # fmt: skip
    save_matrix(
        folder,
        Matrix(
            run_id=record.run_id, trained=record.finished, seconds=1.0, hardware=CPU,
            provenance=record.provenance, rows=tuple(rows), no_raw_text="",
        ),
    )  # fmt: skip
    found = {
        (p["key"], p["used"], p["other"]): p["effect"]
        for p in place.effects()
        if p["key"] not in ("protocol.pad", "protocol.split")
    }
    assert found == pytest.approx(
        {
            ("protocol.stride", 63, 7): -0.2,
            ("protocol.context", 63, 31): 0.3,
            ("protocol.text", "prepared", "raw"): -0.1,
        }
    )
    assert place.ledger("protocol.stride", "E05").startswith("63 to 7: -0.2000 nat/token (one pair")


def test_without_runs_every_guess_is_not_measured_and_another_paper_needs_no_ledger(tmp_path):
    rows = ledger_rows(PAPER, [])
    assert {row["effect"] for row in rows if row["status"] == "guessed"} == {"not measured"}
    assert {row["effect"] for row in rows if row["status"] != "guessed"} == {""}
    paper = write_paper(tmp_path / "paper")
    assert ledger_rows(paper, []) == []
    spec = next(p.spec for p in plan("paper", folder=paper) if p.spec.condition == "plain")
    write_train(tmp_path / "runs", spec, 3.0)
    write_train(tmp_path / "runs", changed(spec, **{"optim.lr": 0.5}), 3.1)
    build(tmp_path / "db", tmp_path / "runs", tmp_path / "none", paper)
    with duckdb.connect(tmp_path / "db", read_only=True) as database:
        (pair,) = database.execute(
            "SELECT used, other, round(effect, 6) FROM effects WHERE key = 'optim.lr'"
        ).fetchall()
    assert (*map(json.loads, pair[:2]), pair[2]) == (1e-3, 0.5, 0.1)
