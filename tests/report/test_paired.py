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
        specs = {p.spec.condition: p.spec for p in plan("smoke") if p.spec.kind == "zeroshot"}

        def write(self, condition, scores, *, doc_hash="h", kept=True, recorded=None):
            value = sum(scores) / len(scores) if recorded is None else recorded
            metric = Metric(name="acc", value=value, unit="fraction", n=len(scores), stderr=0.1,
                            labels={"task": TASK})  # fmt: skip
            folder = write_run(tmp_path / "runs", record_of(self.specs[condition], [metric]))
            rows = [
                {"task": TASK, "subtask": TASK, "doc_id": number, "doc_hash": doc_hash,
                 "target": "0", "acc": score, "acc_norm": None, "nats": [1.0]}
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
                "WHERE claim_id = 'zeroshot-winogrande' AND scale = 'smoke'"
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
