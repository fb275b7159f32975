import json
import math
from datetime import UTC, datetime

import duckdb
import pyarrow as pa
import pytest
from made_up_paper import write_paper
from synthetic import (
    H200,
    bench_metrics,
    curve_of,
    record_of,
    train_metrics,
    write_run,
    write_train,
)

from mol.plan.build import plan
from mol.store.ingest import build
from mol.store.record import Metric

SPLIT = 'labels = { split = "validation" }'
CLAIMS = f"""
[[claim]]
id = "fancy-wins"
place = "Table 1"
text = "Fancy beats plain."
type = "difference"
experiment = "X1"
metric = "ppl"
sides = ["fancy", "plain"]
{SPLIT}
expected = "<0"
seeds = "paired"
cell = "text-gap"

[[claim]]
id = "web-tie"
place = "Table 1"
text = "On web text they tie."
type = "ratio"
experiment = "X1"
metric = "ppl"
sides = ["fancy-web", "plain-web"]
{SPLIT}
expected = "0.99-1.01"
seeds = "single"

[[claim]]
id = "ranking"
place = "Table 1"
text = "A ranking."
type = "ordering"
experiment = "X1"
metric = "ppl"
sides = ["fancy", "plain"]
{SPLIT}
expected = "increasing"
seeds = "paired"

[[claim]]
id = "crossing"
place = "Section 1"
text = "Fancy overtakes plain in the second quarter."
type = "crossover"
experiment = "X1"
metric = "ppl"
sides = ["fancy-web", "plain-web"]
{SPLIT}
along = "training"
expected = "25-50%"
seeds = "single"

[[claim]]
id = "faster"
place = "Table 2"
text = "Fancy is faster."
type = "ratio"
experiment = "X2"
metric = "prefill_tokens_per_s"
sides = [
    {{ condition = "toy-prefill", labels = {{ model = "fancy", length = 128 }} }},
    {{ condition = "toy-prefill", labels = {{ model = "plain", length = 128 }} }},
]
expected = ">1"
seeds = "none"
"""


@pytest.fixture
def suite(tmp_path):
    """The made-up paper with claims: write runs, then ask for a claim's row."""

    class Suite:
        paper = write_paper(tmp_path / "paper")
        runs = tmp_path / "runs"

        def specs(self, scale, condition):
            found = [planned.spec for planned in plan(scale, folder=self.paper)]
            return [spec for spec in found if spec.condition == condition]

        def train(self, condition, ppls, scale="proxy"):
            for spec, ppl in zip(self.specs(scale, condition), ppls, strict=False):
                write_train(self.runs, spec, math.log(ppl))

        def result(self, claim_id, scale="proxy"):
            build(tmp_path / "db", self.runs, tmp_path / "records", self.paper)
            with duckdb.connect(tmp_path / "db", read_only=True) as database:
                cursor = database.execute(
                    "SELECT * FROM claim_results WHERE claim_id = ? AND scale = ?",
                    [claim_id, scale],
                )
                names = [column[0] for column in cursor.description]
                rows = cursor.fetchall()
            return dict(zip(names, rows[0], strict=True)) if rows else None

    (tmp_path / "paper" / "claims.toml").write_text(CLAIMS)
    return Suite()


@pytest.mark.parametrize(
    "fancy, outcome",
    [
        ([27.0, 27.1, 26.9], "holds"),
        ([33.0, 33.1, 32.9], "does not hold"),
        ([29.0, 30.5, 31.0], "undecided"),
    ],
)
def test_paired_seeds_decide_a_difference(suite, fancy, outcome):
    suite.train("plain", [30.0, 30.1, 29.9])
    suite.train("fancy", fancy)
    row = suite.result("fancy-wins")
    assert row["outcome"] == outcome
    pairs = [math.log(a / b) for a, b in zip(fancy, [30.0, 30.1, 29.9], strict=True)]
    assert row["effect"] == pytest.approx(sum(pairs) / 3)
    assert row["low"] < row["effect"] < row["high"]
    assert (row["unit"], row["n"], row["hardware"]) == ("nat", 3, "Made-up CPU")
    assert len(json.loads(row["runs"])) == 6
    ranking = suite.result("ranking")
    assert ranking["outcome"] == outcome
    assert ranking["effect"] == pytest.approx(-row["effect"])


def test_the_interval_of_pairs_by_hand(suite):
    suite.train("plain", [30.0, 31.0, 29.0])
    suite.train("fancy", [27.0, 28.0, 26.0])
    pairs = [math.log(27 / 30), math.log(28 / 31), math.log(26 / 29)]
    mean = sum(pairs) / 3
    sd = math.sqrt(sum((pair - mean) ** 2 for pair in pairs) / 2)
    half = math.hypot(4.302653 * sd / math.sqrt(3), 1.959964 * math.sqrt(2) * 0.002)
    row = suite.result("fancy-wins")
    assert row["high"] - row["effect"] == pytest.approx(half, rel=1e-4)


def test_one_seed_takes_the_spread_of_this_scale_and_says_so(suite):
    suite.train("plain", [30.0, 30.3, 29.7])
    suite.train("fancy-web", [20.0])
    suite.train("plain-web", [20.05])
    row = suite.result("web-tie")
    sigma = 0.01  # sd of log(30), log(30.3), log(29.7)
    half = math.hypot(4.302653 * math.sqrt(2) * sigma, 1.959964 * math.sqrt(2) * 0.002)
    assert row["high"] - row["effect"] == pytest.approx(half, rel=1e-3)
    assert row["outcome"] == "undecided"
    assert row["note"] == "one seed, sigma 0.01 of other data at this scale"


@pytest.mark.parametrize(
    "fancy, alone",
    [
        (20.0, "by that error alone the claim would hold"),
        (10.0, "by that error alone the claim would not hold"),
        (19.8, "that error leaves the claim undecided too"),
    ],
)
def test_without_any_spread_one_seed_decides_nothing_and_says_what_it_shows(suite, fancy, alone):
    suite.train("fancy-web", [fancy])
    suite.train("plain-web", [20.0])
    row = suite.result("web-tie")
    assert (row["outcome"], row["low"], row["high"]) == ("undecided", None, None)
    assert row["effect"] == pytest.approx(math.log(fancy / 20))
    assert "no spread of seeds is known" in row["note"]
    assert f"the text's sampling error alone is ± 0.0055; {alone}" in row["note"]


def test_scales_never_mix(suite):
    suite.train("plain", [30.0, 30.1, 29.9], scale="proxy")
    suite.train("fancy", [27.0, 27.1, 26.9], scale="smoke")
    assert suite.result("fancy-wins", "proxy") is None
    assert suite.result("fancy-wins", "smoke") is None
    assert suite.result("fancy-wins", "paper")["outcome"] == "not run"


@pytest.mark.parametrize(
    "crossing, outcome", [(0.3, "holds"), (0.8, "does not hold"), (2.0, "does not hold")]
)
def test_a_crossover_is_read_from_the_curves(suite, crossing, outcome):
    suite.train("plain", [30.0, 30.1, 29.9])  # a spread of seeds, without which nothing is decided
    write_crossing(suite, crossing)
    row = suite.result("crossing")
    assert row["outcome"] == outcome
    if crossing < 1:
        assert row["low"] <= 100 * crossing <= row["high"] and row["unit"] == "% of steps"
    else:
        assert row["effect"] is None and "never" in row["note"]


@pytest.mark.parametrize("crossing", [0.3, 2.0])
def test_a_crossover_of_one_seed_waits_for_a_spread_as_margins_do(suite, crossing):
    write_crossing(suite, crossing)
    row = suite.result("crossing")
    assert row["outcome"] == "undecided" and "no spread of seeds is known" in row["note"]
    assert (row["effect"] is None) == (crossing > 1) and ("never" in row["note"]) == (crossing > 1)


def write_crossing(suite, crossing):
    """Curves of which the first stays below the other from a share of the steps on."""
    for condition, sign in (("fancy-web", -1.0), ("plain-web", 0.0)):
        (spec,) = suite.specs("proxy", condition)
        table = curve_of(spec, 3.0).to_pydict()
        for i, (step, name) in enumerate(zip(table["step"], table["name"], strict=True)):
            if name == "validation_nll":
                table["value"][i] += sign if step > crossing * spec.optim.steps else -sign
        write_run(suite.runs, record_of(spec, train_metrics(spec, 3.0)), pa.table(table))


@pytest.mark.parametrize(
    "path, fancy, plain, outcome",
    [
        ("loop", 110.0, 100.0, "holds"),
        ("loop", 90.0, 100.0, "does not hold"),
        ("loop", 100.5, 100.0, "undecided"),
        # Another program than the paper's: its figures are shown and decide nothing.
        ("one_pass", 110.0, 100.0, "undecided"),
        ("one_pass", 90.0, 100.0, "undecided"),
    ],
)
def test_timings_decide_by_their_own_range(suite, path, fancy, plain, outcome):
    (spec,) = suite.specs("paper", "toy-prefill")
    metrics = [
        Metric(name="prefill_tokens_per_s", value=value, unit="token/s", n=5, low=0.99 * value,
               high=1.01 * value, labels={"model": model, "length": 128, "path": path})
        for model, value in (("fancy", fancy), ("plain", plain))
    ]  # fmt: skip
    write_run(suite.runs, record_of(spec, metrics, hardware=H200))
    row = suite.result("faster", "paper")
    assert row["outcome"] == outcome
    assert ("path one_pass" in row["note"]) == (path == "one_pass")
    assert row["effect"] == pytest.approx(math.log(fancy / plain))
    assert row["high"] - row["effect"] == pytest.approx(math.hypot(0.01, 0.01))
    assert row["hardware"] == "NVIDIA H200"


def test_claims_without_runs_are_not_run(suite):
    (spec,) = suite.specs("smoke", "toy-attention")
    write_run(suite.runs, record_of(spec, bench_metrics(spec)))
    for claim in ("fancy-wins", "web-tie", "ranking", "crossing", "faster"):
        assert suite.result(claim, "paper")["outcome"] == "not run"
        assert suite.result(claim, "smoke") is None


@pytest.mark.parametrize(
    "epochs, made, outcome",
    [
        ("<1.05", 0.5, "holds"),  # write_train records half a pass
        ("~8", 0.5, "undecided"),
        ("~8", 8.2, "holds"),
        ("<1.05", 1.2, "undecided"),
        ("<1.05", None, "undecided"),
    ],
)
def test_a_claim_about_the_data_regime_wants_its_number_of_passes(suite, epochs, made, outcome):
    claims = suite.paper / "claims.toml"
    claims.write_text(
        CLAIMS.replace('cell = "text-gap"', f'cell = "text-gap"\nepochs = "{epochs}"')
    )
    for condition, ppl in (("fancy", 27.0), ("plain", 30.0)):
        for number, spec in enumerate(suite.specs("proxy", condition)):
            metrics = [
                metric.model_copy(update={"value": made} if metric.name == "epochs" else {})
                for metric in train_metrics(spec, math.log(ppl + number / 100))
                if made is not None or metric.name != "epochs"
            ]
            write_run(suite.runs, record_of(spec, metrics), curve_of(spec, 3.0))
    row = suite.result("fancy-wins")
    assert row["outcome"] == outcome
    if outcome == "undecided":
        assert row["effect"] is None and row["note"].startswith("not evaluated: ")
        assert made is None or f"{made:.2g} epochs, the claim is about {epochs}" in row["note"]


def test_losses_after_unlike_training_or_on_unlike_text_are_not_compared(suite):
    (spec, *_), (other, *_) = suite.specs("proxy", "fancy"), suite.specs("proxy", "plain")
    name = "own text in place of wikitext103: a.txt"
    own = {"source": name, "validation_sha256": "a"}
    write_train(suite.runs, spec, math.log(27), data=own)
    write_train(suite.runs, other, math.log(30), data=own)
    row = suite.result("fancy-wins")
    assert row["effect"] == pytest.approx(math.log(27 / 30))
    assert "own text in place of wikitext103" in row["note"]
    shorter = other.model_copy(update={"optim": other.optim.model_copy(update={"steps": 12_800})})
    later = {"finished": datetime(2026, 1, 2, tzinfo=UTC)}
    write_train(suite.runs, shorter, math.log(30), data=own, **later)
    row = suite.result("fancy-wins")
    assert (
        row["effect"] is None and "not compared, trained for 128000 and 12800 steps" in row["note"]
    )
    write_train(suite.runs, other, math.log(30), data=own | {"validation_sha256": "b"}, **later | {
        "finished": datetime(2026, 1, 3, tzinfo=UTC)
    })  # fmt: skip
    assert "not compared, unlike validation text" in suite.result("fancy-wins")["note"]
