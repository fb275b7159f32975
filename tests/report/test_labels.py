"""Figures are found by their labels, also by those that a perplexity's protocol has too."""

import duckdb
import pytest
from synthetic import H200, bench_metrics, record_of, train_metrics, write_run

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.store.ingest import build
from mol.store.record import Metric


def routing(split, coverage, gap):
    labels = {"split": split}
    return [
        Metric(name="coverage", value=coverage, unit="fraction", labels=labels),
        Metric(name="inter_token_gap", value=gap, unit="token", n=9, labels=labels),
    ]


def test_the_validation_split_gives_the_printed_figures_and_decides_the_claims(tmp_path):
    wanted = {"sparse-3of5": (0.6, 1.7), "sparse-3of15": (0.2, 4.9)}
    for planned in plan("smoke"):
        spec = planned.spec
        if spec.condition in wanted and spec.kind == "train" and spec.seed == 42:
            found = wanted[spec.condition]
            figures = routing("validation", *found) + routing("test", 0.5, 2.0)
            write_run(tmp_path / "runs", record_of(spec, train_metrics(spec, 3.0) + figures))
    build(tmp_path / "db", tmp_path / "runs", tmp_path / "none", PAPER)
    with duckdb.connect(tmp_path / "db", read_only=True) as database:
        cells = dict(
            database.execute(
                "SELECT condition || ' ' || metric, reproduced FROM verdicts JOIN cells "
                "USING (cell_id) WHERE metric IN ('coverage', 'inter_token_gap') "
                "AND scale = 'smoke'"
            ).fetchall()
        )
        claims = dict(
            database.execute(
                "SELECT claim_id, outcome FROM claim_results WHERE scale = 'smoke' "
                "AND claim_id LIKE 'coverage-%'"
            ).fetchall()
        )
    assert cells == {
        "sparse-3of5 coverage": pytest.approx(60), "sparse-3of15 coverage": pytest.approx(20),
        "sparse-3of5 inter_token_gap": 1.7, "sparse-3of15 inter_token_gap": 4.9,
    }  # fmt: skip
    assert claims["coverage-share"] == "holds" and "coverage-gap" in claims


def test_a_decoding_time_is_found_by_its_context(tmp_path):
    (spec,) = (p.spec for p in plan("paper") if p.spec.condition == "decode")
    write_run(tmp_path / "runs", record_of(spec, bench_metrics(spec), hardware=H200))
    build(tmp_path / "db", tmp_path / "runs", tmp_path / "none", PAPER)
    with duckdb.connect(tmp_path / "db", read_only=True) as database:
        found = database.execute(
            "SELECT reproduced, verdict FROM verdicts "
            "WHERE cell_id LIKE 't12.256.%' AND scale = 'paper' AND verdict IS NOT NULL"
        ).fetchall()
    assert found == [(pytest.approx(1.256), "not judgeable here")] * 2  # printed for an RTX 3090
