"""Scores of two models on the same items: hand-computed McNemar, and what cannot be paired."""

import math

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import record_of, write_run

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.paired import paired, same_items
from mol.store.ingest import build
from mol.store.record import Metric

TASK = "winogrande"


def items(scores, doc_hash="h"):
    return {("t", number, doc_hash): score for number, score in enumerate(scores)}


def answers(both, first, second, neither):
    """Scores of two models that have so many items right together, alone, or not at all."""
    one = [1.0] * both + [1.0] * first + [0.0] * second + [0.0] * neither
    other = [1.0] * both + [0.0] * first + [1.0] * second + [0.0] * neither
    return one, other


def test_exact_mcnemar_by_hand():
    """Eight items only the first has right and one only the second: p = 2 (1 + 9) / 2^9."""
    found = paired(*map(items, answers(5, 8, 1, 6)))
    assert found.value == pytest.approx(7 / 20)
    assert "exact McNemar: 8 against 1, p = 0.039" in found.method
    # Clopper-Pearson of 8 of 9 (tables: 0.51750 to 0.99719), turned into a difference; the normal
    # interval, 0.35 +- 1.96 sqrt(9 - 49 / 20) / 20, is the wider one above.
    assert found.low == pytest.approx((2 * 0.51750 - 1) * 9 / 20, abs=1e-5)
    assert found.high == pytest.approx(0.35 + 1.959964 * math.sqrt(6.55) / 20)
    assert found.high > (2 * 0.99719 - 1) * 9 / 20


@pytest.mark.parametrize("first, second", [(5, 0), (6, 0), (7, 1), (8, 1), (30, 15), (40, 20)])
def test_the_interval_leaves_out_no_effect_where_the_test_rejects_it(first, second):
    m = first + second
    p = min(1.0, 2 * sum(math.comb(m, k) for k in range(second + 1)) / 2**m)
    found = paired(*map(items, answers(10, first, second, 10)))
    assert (found.low > 0) == (p < 0.05)
    assert f"p = {p:.2g}" in found.method


def test_models_that_answer_alike_leave_room_for_what_n_items_cannot_show():
    found = paired(items([1.0, 0.0] * 50), items([1.0, 0.0] * 50))
    assert found.value == 0 and found.high == pytest.approx(0.0362, abs=1e-4) == -found.low


def test_a_mean_of_shares_takes_a_t_interval():
    one, other = items([0.5, 0.6, 0.7]), items([0.4, 0.4, 0.4])
    found = paired(one, other)
    assert found.value == pytest.approx(0.2) and "t interval" in found.method
    assert found.high - found.value == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)


def test_unlike_items_are_not_paired():
    assert same_items(items([1.0]), {}) == "the items of a run were not kept"
    assert "unlike items (1 of 1" in same_items(items([1.0], "a"), items([1.0], "b"))
    assert same_items(items([1.0, 0.0]), items([0.0, 1.0])) == ""


# ---- through the store ----


@pytest.fixture
def place(tmp_path):
    class Place:
        scale = "smoke"

        def write(self, condition, scores, *, doc_hash="h", kept=True, recorded=None, **labels):
            value = sum(scores) / len(scores) if recorded is None else recorded
            metric = Metric(name="acc", value=value, unit="fraction", n=len(scores), stderr=0.1,
                            labels={"task": TASK} | labels)  # fmt: skip
            scored = (p.spec for p in plan(self.scale) if p.spec.kind == "zeroshot")
            spec = next(spec for spec in scored if spec.condition == condition)
            folder = write_run(tmp_path / "runs", record_of(spec, [metric]))
            rows = [
                {"task": metric.labels["task"], "subtask": TASK, "doc_id": number,
                 "doc_hash": doc_hash, "target": "0", "acc": score, "acc_norm": None,
                 "nats": [1.0]}
                for number, score in enumerate(scores)
            ]  # fmt: skip
            if kept:
                pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")
            return folder / "samples.parquet"

        def ask(self, sql):
            self.refused = build(tmp_path / "db", tmp_path / "runs", tmp_path / "none", PAPER)
            with duckdb.connect(tmp_path / "db", read_only=True) as database:
                return database.execute(sql).fetchall()

        def claim(self):
            (row,) = self.ask(
                "SELECT outcome, effect, low, high, note FROM claim_results "
                f"WHERE claim_id = 'zeroshot-winogrande' AND scale = '{self.scale}'"
            )
            return row

    return Place()


def test_a_claim_is_decided_by_the_pairs_and_names_the_test(place):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one)
    place.write("dense-0p7b", other)
    outcome, effect, low, high, note = place.claim()
    assert outcome == "holds"  # the two stderr of 0.1 alone would leave it undecided
    assert effect == pytest.approx(0.15) and 0 < low < effect < high
    assert "paired over 100 items, exact McNemar: 20 against 5, p = 0.0041" in note
    assert place.ask("SELECT count(*), count(DISTINCT run_id) FROM items") == [(200, 2)]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"kept": False}, "the items of a run were not kept"),
        ({"doc_hash": "other"}, "unlike items (100 of 100"),
        ({"recorded": 0.3}, "the items do not give the recorded scores"),
    ],
)
def test_without_pairs_the_claim_says_so_and_keeps_the_wider_interval(place, change, reason):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one)
    place.write("dense-0p7b", other, **change)
    outcome, effect, low, high, note = place.claim()
    assert outcome == "undecided" and f"unpaired intervals: {reason}" in note
    assert high - effect == pytest.approx(1.959964 * 0.1 * math.sqrt(2), rel=1e-5)


@pytest.mark.parametrize("scale, expected", [("proxy", "holds"), ("paper", "not run")])
def test_other_items_can_decide_a_claim_below_the_papers_scale_only(place, scale, expected):
    place.scale = scale
    stand_ins = ["fineweb-dense-152m", "fineweb-1p3of15", "fineweb-dense-98m"]
    models = stand_ins if scale == "proxy" else ["dense-1p3b", "mol-2p08b", "dense-0p7b"]
    for right, model in zip((10, 40, 80), models, strict=True):
        scores = [1.0] * right + [0.0] * (100 - right)
        place.write(model, scores, task="truthfulqa_mc1 (other items)", items="abc")
    ((outcome, note),) = place.ask(
        "SELECT outcome, coalesce(note, '') FROM claim_results "
        f"WHERE claim_id = 'zeroshot-truthfulqa-mc1' AND scale = '{scale}'"
    )
    assert outcome == expected
    assert ("other items of the task than the paper's" in note) == (scale == "proxy")


def test_broken_items_are_refused_alone(place):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one).write_bytes(b"no parquet")
    twice = place.write("dense-0p7b", other)
    table = pq.read_table(twice)
    pq.write_table(pa.concat_tables([table, table]), twice)
    assert "not kept" in place.claim()[-1]
    reasons = {refusal.file.split("/")[-1]: refusal.reason for refusal in place.refused}
    assert len(place.refused) == 2 and set(reasons) == {"samples.parquet"}
    assert any("twice" in refusal.reason for refusal in place.refused)


def test_a_printed_difference_of_scores_takes_the_items_error(place):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one)
    place.write("dense-0p7b", other)
    ((figure, note),) = place.ask(
        "SELECT reproduced, note FROM verdicts WHERE cell_id = 'txt.s5p5.winogrande' "
        "AND scale = 'smoke'"
    )
    assert figure == pytest.approx(15.0) and "exact McNemar: 20 against 5" in note


@pytest.mark.parametrize(
    "label, theirs", [("harness", "lm_eval 0.4.7"), ("task_version", "2.0"), ("definition", "a")]
)
def test_scores_of_unlike_tests_are_flagged_and_never_compared(place, label, theirs):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one, harness="lm_eval 0.4.13", task_version="1.0", definition="b")
    labels = {"harness": "lm_eval 0.4.13", "task_version": "1.0", "definition": "b"}
    place.write("dense-0p7b", other, **labels | {label: theirs})
    outcome, effect, *_, note = place.claim()
    why = f"not compared, unlike {label.replace('_', ' ')} ({labels[label]} and {theirs})"
    assert (outcome, effect) == ("undecided", None) and why in note
    ((value, p, note),) = place.ask("SELECT value, p, note FROM comparisons")
    assert value is None and p is None and label.replace("_", " ") in note


def test_every_two_models_are_compared_on_each_task(place):
    one, other = answers(30, 20, 5, 45)
    place.write("mol-2p08b", one)
    place.write("dense-0p7b", other)
    ((first, second, seed, value, stderr, p, n, note),) = place.ask(
        "SELECT condition, other, seed, value, stderr, p, n, note FROM comparisons"
    )
    assert (first, second, seed, n) == ("mol-2p08b", "dense-0p7b", 42, 100)
    assert value == pytest.approx(0.15) and stderr == pytest.approx(math.sqrt(25 - 2.25) / 100)
    # twice the probability of 5 or fewer of 25 fair coins
    assert p == pytest.approx(2 * sum(math.comb(25, k) for k in range(6)) / 2**25)
    assert "exact McNemar: 20 against 5" in note


def test_at_proxy_scale_the_models_of_the_80m_experiment_stand_in(place):
    place.scale = "proxy"
    one, other = answers(30, 20, 5, 45)
    place.write("fineweb-1p3of15", one)
    place.write("fineweb-dense-98m", other)
    outcome, *_, note = place.claim()
    assert outcome == "holds" and "exact McNemar: 20 against 5" in note
    assert "fineweb-1p3of15 in place of mol-2p08b" in note
    owners = place.ask("SELECT DISTINCT experiment FROM run_experiments ORDER BY 1")
    assert owners == [("E12",)]
    # The paper's cells are about its own models: none of them gets a figure of a stand-in.
    assert place.ask("SELECT * FROM verdicts WHERE n_runs > 0 AND scale = 'proxy'") == []


def test_another_version_of_a_task_than_the_papers_judges_nothing(place):
    place.scale = "paper"
    place.write("mol-2p08b", [1.0, 0.0], task="truthfulqa_mc2", task_version="3.0")
    place.write("dense-0p7b", [1.0, 0.0], task="truthfulqa_mc2", task_version="2.0")
    rows = place.ask(
        "SELECT cell_id, verdict, difference, note FROM verdicts "
        "WHERE cell_id LIKE 't06.truthfulqa_mc2.%' AND n_runs > 0 ORDER BY 1"
    )
    found = {cell.split(".")[-1]: rest for cell, *rest in rows}
    verdict, difference, note = found["mol-2p08b"]
    assert (verdict, difference) == ("not judgeable here", None)
    assert "ours ran otherwise than the paper's: task_version 3.0" in note
    assert found["dense-0p7b"][1] is not None and "version" not in found["dense-0p7b"][2]
