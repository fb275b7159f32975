import json
import math

import duckdb
import pyarrow as pa
import pytest
from made_up_paper import CELLS, cell, write_paper
from synthetic import (
    CPU,
    H200,
    bench_metrics,
    curve_of,
    record_of,
    train_metrics,
    write_run,
    write_train,
)

from mol.base import UserError
from mol.data.config import WheelSource
from mol.paper.cell import Cell
from mol.plan.experiments import load_experiments
from mol.report.crossover import first_that_stays, lengths_apart
from mol.report.query import Query, same_hardware
from mol.report.readings import PROTOCOL, Reading, Runs
from mol.report.verdicts import Borrowed, Figure, Printed, Protocol, Sample, judge
from mol.store.ingest import build
from mol.store.record import Metric

KNOWN = Borrowed(sigma=0.003, source="sigma 0.30 % of a test", supported=True)


def judged(printed, values, *, borrowed=KNOWN, nearest=1.0, stderr=None, **more):
    figure = Figure(
        value=sum(values) / len(values), samples=(Sample(values=tuple(values)),), stderr=stderr
    )
    rule = {"log": True, "timing": False, "borrowed": borrowed, "nearest": nearest} | more
    return judge(printed, figure, **rule)


# ---- the rule ----


def test_half_width_by_hand_with_two_borrowed_sigmas():
    found = judged(Printed(value=30.0, half_unit=0.005), [30.1], stderr=0.0301)
    seeds = 1.959964 * math.sqrt(2) * 0.003
    evaluation = 1.959964 * 0.001
    assert found.parts["rounding"] == pytest.approx(0.005 / 30)
    assert found.parts["seeds"] == pytest.approx(seeds, rel=1e-6)
    assert found.parts["evaluation"] == pytest.approx(evaluation, rel=1e-6)
    assert found.half_width == pytest.approx(0.005 / 30 + math.hypot(seeds, evaluation))
    assert found.difference == pytest.approx(math.log(30.1 / 30))
    assert found.verdict == "reproduced"
    assert len(found.notes) == 2  # both sides borrow, and say so


def test_seed_spread_uses_ddof_1_and_welch():
    printed = Printed(value=30.0, half_unit=0.0, spread=0.3, n_seeds=3)
    found = judged(printed, [29.7, 30.0, 30.3])
    # Equal spreads of 0.01 nat on both sides, three seeds each: 4 degrees of freedom.
    expected = 2.776445 * math.sqrt(0.01**2 / 3 + 0.01**2 / 3)
    assert found.parts["seeds"] == pytest.approx(expected, rel=1e-3)
    assert found.notes == ()


@pytest.mark.parametrize(
    "values, nearest, borrowed, verdict",
    [
        ([30.0], 0.1, KNOWN, "reproduced"),
        ([31.0], 0.1, KNOWN, "not reproduced"),
        ([29.0], 0.1, KNOWN, "not reproduced"),
        ([30.0], 0.01, KNOWN, "under-powered"),  # cannot tell the neighbor apart
        ([30.0], None, KNOWN, "under-powered"),  # no neighbor
        ([30.0], 0.1, Borrowed(sigma=0.003, source="", supported=False), "under-powered"),
        ([40.0], 0.1, Borrowed(sigma=0.003, source="", supported=False), "not reproduced"),
        ([30.0], 0.1, Borrowed(sigma=None, source="", supported=False), "under-powered"),
    ],
)
def test_each_verdict_of_the_rule(values, nearest, borrowed, verdict):
    printed = Printed(value=30.0, half_unit=0.005)
    assert judged(printed, values, nearest=nearest, borrowed=borrowed).verdict == verdict


def test_timings_take_the_stated_spread_and_ours():
    printed = Printed(value=100.0, half_unit=0.5, timing=0.02)
    figure = Figure(value=103.0, samples=(Sample(values=(103.0,)),), half_range=1.03)
    found = judge(printed, figure, log=True, timing=True, borrowed=None, nearest=1.0)
    assert found.parts == pytest.approx({"rounding": 0.005, "timing": math.hypot(0.02, 0.01)})
    assert found.verdict == "not reproduced"
    unstated = Printed(value=100.0, half_unit=0.5)
    found = judge(unstated, figure, log=True, timing=True, borrowed=None, nearest=1.0)
    assert found.parts["timing"] == pytest.approx(0.01)
    assert "states no spread" in found.notes[0]


def test_a_printed_stderr_is_evaluation_error():
    found = judged(Printed(value=50.0, half_unit=0.05, spread=1.0), [50.5], stderr=1.01)
    assert found.parts["evaluation"] == pytest.approx(1.959964 * math.hypot(0.02, 0.02))


def test_a_log_ratio_to_zero_raises():
    with pytest.raises(UserError, match="must be positive"):
        judged(Printed(value=30.0, half_unit=0.005), [0.0])


@pytest.mark.parametrize(
    "key, value", [("unit", "ppl/word"), ("split", "test"), ("tokenizer", "gpt2"), ("pad", "none")]
)
def test_unlike_perplexities_raise(key, value):
    one = {"unit": "ppl/token", "split": "validation", "tokenizer": "bpe", "pad": "masked"}
    Protocol(**one).check_alike(Protocol(**one | {"pad": None}), "cell")
    with pytest.raises(UserError, match=f"cell: {key}"):
        Protocol(**one).check_alike(Protocol(**one | {key: value}), "cell")


def test_crossover_is_where_the_sign_stays():
    assert first_that_stays([(1, -1), (2, 1), (3, -1), (4, -2)]) == (2, 3)
    assert first_that_stays([(1, -1), (2, -1)]) == (1, 1)
    assert first_that_stays([(1, -1), (2, 0)]) is None
    assert first_that_stays([]) is None


@pytest.mark.parametrize(
    "printed, name, count, same",
    [
        ("H200", "NVIDIA H200", 1, True),
        ("H200", "NVIDIA H200 NVL", 1, False),
        ("4× H200 NVL", "NVIDIA H200 NVL", 4, True),
        ("4× H200 NVL", "NVIDIA H200 NVL", 1, False),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", 1, True),
        ("RTX 3090", "NVIDIA GeForce RTX 3090 Ti", 1, False),
        ("A100 SXM4 80GB", "NVIDIA A100-SXM4-80GB", 1, True),
        ("H100 SXM 80GB", "NVIDIA H100 80GB HBM3", 1, True),
        ("H100 SXM 80GB", "NVIDIA H100 PCIe", 1, False),
    ],
)
def test_a_gpu_counts_only_where_it_is_named(printed, name, count, same):
    assert same_hardware(printed, {"hardware": name, "hardware_count": count}) == same


# ---- records of a made-up paper ----


def test_three_seeds_near_the_printed_mean_reproduce_it(suite):
    suite.train("plain", [29.96, 30.02, 30.05])
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "reproduced", row["note"]
    assert row["reproduced"] == pytest.approx(30.01)
    assert row["difference"] == pytest.approx(0.01)
    assert row["difference_nats"] == pytest.approx(math.log(30.01 / 30))
    assert row["n_runs"] == 3 and len(json.loads(row["runs"])) == 3
    parts = json.loads(row["parts"])
    assert parts.keys() == {"rounding", "seeds", "evaluation"}
    assert parts["rounding"] == pytest.approx(0.005 / 30)
    assert row["half_width"] > parts["seeds"] > parts["rounding"] > 0


def test_three_seeds_far_away_do_not(suite):
    suite.train("plain", [31.0, 31.1, 31.2])
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "not reproduced"
    assert abs(row["difference_nats"]) > row["half_width"]


def test_scattered_seeds_are_under_powered(suite):
    suite.train("plain", [27.0, 30.0, 33.0])
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "under-powered"
    assert row["half_width"] > math.log(30 / 27) / 2


def test_one_seed_borrows_the_conditions_own_sigma_and_says_so(suite):
    suite.train("plain", [30.0])
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "reproduced"
    assert "ours: one seed, sigma 0.17 % as printed for this condition" in row["note"]
    assert "no run with seed 2, 3" in row["note"]


def test_a_borrowed_sigma_of_other_data_gives_at_best_under_powered(suite):
    suite.train("fancy-web", [20.0])
    row = suite.verdict("t1-web")
    assert row["verdict"] == "under-powered"
    assert "of other data than fineweb_edu" in row["note"]
    assert row["half_width"] < math.log(26 / 20) / 2  # the width alone would have sufficed


def test_without_runs_a_cell_is_not_run(suite):
    row = suite.verdict("t1-plain")
    assert (row["verdict"], row["reproduced"], row["cost_gpu_hours"]) == ("not run", None, None)


def test_the_cost_of_a_missing_run_comes_from_a_measured_rate(suite):
    suite.train("plain", [30.0], scale="proxy", hardware=H200)
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "not run"
    assert row["cost_gpu_hours"] == pytest.approx(3 * 400 * 8 * 64 / 5e3 / 3600)


@pytest.mark.parametrize("scale", ["smoke", "proxy"])
def test_other_scales_never_judge(suite, scale):
    suite.train("plain", [30.0, 30.0, 30.0], scale=scale)
    beside = suite.verdict("t1-plain", scale)
    assert beside["verdict"] == "not run at paper scale"
    assert beside["reproduced"] == pytest.approx(30.0)
    assert beside["half_width"] is None
    assert suite.verdict("t1-plain")["verdict"] == "not run"


def test_text_that_stands_in_for_the_corpus_never_judges(suite):
    for seed in (1, 2, 3):
        spec = suite.spec("plain", seed)
        data = spec.data.model_copy(update={"source": WheelSource()})
        write_train(suite.runs, spec.model_copy(update={"data": data}), math.log(30.0))
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "not judgeable here" and "from the hub" in row["note"]


def test_counts_agree_or_are_contradicted(tmp_path):
    cells = [
        dict(CELLS[0], cell_id="right", kind="count", printed="89K", metric="params_total",
             condition="plain"),
        dict(CELLS[0], cell_id="wrong", kind="count", printed="2.5M", metric="params_total",
             condition="plain"),
    ]  # fmt: skip
    paper = write_paper(tmp_path / "paper", cells)
    build(tmp_path / "db", tmp_path / "runs", tmp_path / "records", paper)
    with duckdb.connect(tmp_path / "db", read_only=True) as database:
        rows = dict(database.execute("SELECT cell_id, verdict FROM verdicts").fetchall())
        (count,) = database.execute("SELECT DISTINCT reproduced FROM verdicts").fetchone()
    # Embedding, attention with biases, two FFN matrices, three norms.
    assert count == 1000 * 64 + 4 * 64**2 + 4 * 64 + 2 * 64**2 + 3 * 64
    assert rows == {"right": "agrees", "wrong": "contradicted"}


def test_a_timing_counts_on_the_gpu_it_names(suite):
    suite.bench("toy-prefill", path="loop")
    assert suite.verdict("t2-128")["verdict"] == "not reproduced"
    other = suite.verdict("t2-256")
    assert other["verdict"] == "not judgeable here"
    assert other["note"] == "the paper's is RTX 3090, ours NVIDIA H200"
    assert other["reproduced"] > 0  # ours stands beside
    unnamed = suite.verdict("t2-unnamed")
    assert unnamed["verdict"] == "not judgeable here" and "name the hardware" in unnamed["note"]


def test_another_dispatch_path_does_not_judge(suite):
    suite.bench("toy-prefill", path="one_pass")
    row = suite.verdict("t2-128")
    assert row["verdict"] == "not judgeable here"
    assert row["note"] == "ours ran otherwise than the paper's: path one_pass"


@pytest.mark.parametrize("mode", ["eager", "compiled", "graph", "compiled_graph", None])
def test_only_a_model_that_ran_as_the_papers_judges(suite, mode):
    """The label decides, whatever the notes say; without one a figure counts as the paper's."""
    spec = suite.spec("toy-prefill", seed=0)
    metrics = []
    for metric in bench_metrics(spec):
        labels = metric.labels | {"path": "dense", "mode": mode}
        labels = {key: value for key, value in labels.items() if value is not None}
        metrics.append(metric.model_copy(update={"labels": labels}))
    note = "layers compiled; a timed call replays a CUDA graph of the whole pass"
    write_run(suite.runs, record_of(spec, metrics, hardware=H200, notes=(note,)))
    row = suite.verdict("t2-128")
    judged = mode in ("eager", None)
    assert (row["verdict"] != "not judgeable here") == judged, row["note"]
    assert (row["difference"] is not None) == judged
    assert judged or row["note"] == f"ours ran otherwise than the paper's: mode {mode}"


def test_figures_of_a_benchmark_that_is_ours_alone_stand_beside(suite):
    experiments = suite.paper / "experiments.toml"
    text = experiments.read_text().replace('"toy-attention"]', '"toy-attention", "toy-ours"]')
    text = text.replace("[benches.toy-prefill]", '[benches.toy-prefill]\nbeside = ["toy-ours"]')
    experiments.write_text(
        text + '\n[benches.toy-ours]\nprogram = "prefill"\nmodels = ["fancy"]\n'
        "smoke = { lengths = [32] }\npaper = { lengths = [128] }\n"
    )
    suite.bench("toy-prefill")
    suite.bench("toy-ours", mode="compiled_graph", path="one_pass")
    row = suite.verdict("t2-128")
    assert row["verdict"] != "not judgeable here" and row["n_runs"] == 1
    assert "beside it 500,000 token/s with mode compiled_graph, path one_pass" in row["note"]
    experiments.write_text(text)
    with pytest.raises(UserError, match="unknown benchmark 'toy-ours'"):
        load_experiments(suite.paper)


def test_the_fastest_program_stands_beside_the_one_that_judges(suite):
    spec = suite.spec("toy-prefill", seed=0)
    metrics = [
        Metric(name="prefill_tokens_per_s", value=value, unit="token/s", n=5, low=value, high=value,
               labels={"model": "fancy", "length": 128, "path": path, "mode": mode})
        for path, mode, value in (
            ("loop", "eager", 10_010.0),
            ("loop", "compiled", 20_000.0),
            ("one_pass", "compiled_graph", 50_000.0),
        )
    ]  # fmt: skip
    write_run(suite.runs, record_of(spec, metrics, hardware=H200))
    row = suite.verdict("t2-128")
    assert row["reproduced"] == 10_010.0 and row["verdict"] != "not judgeable here"
    assert "beside it 50,000 token/s with mode compiled_graph, path one_pass" in row["note"]


@pytest.mark.parametrize("path, judged", [("one_pass", False), ("loop", True)])
def test_a_crossover_by_another_path_does_not_judge(suite, path, judged):
    cells = [
        cell(
            "t2-cross", "2", "caption", "crossover", "128-256", condition="toy-prefill",
            labels="model=fancy", versus="model=plain", op="crossover", unit="length",
            metric="prefill_tokens_per_s", experiment="X2", hardware="H200", n_seeds="1",
        )
    ]  # fmt: skip
    write_paper(suite.paper, [*CELLS, *cells])
    spec = suite.spec("toy-prefill", seed=0)
    metrics = [
        metric.model_copy(
            update={
                "labels": metric.labels
                | {"path": path if metric.labels["model"] == "fancy" else "dense"}
            }
        )
        for metric in bench_metrics(spec)
    ]
    write_run(suite.runs, record_of(spec, metrics, hardware=H200))
    row = suite.verdict("t2-cross")
    assert (row["verdict"] != "not judgeable here") == judged, row["note"]


def test_the_fastest_of_the_papers_paths_is_read(suite):
    spec = suite.spec("toy-prefill", seed=0)
    metrics = [
        Metric(name="prefill_tokens_per_s", value=value, unit="token/s", low=value, high=value,
               labels={"model": "fancy", "length": 128, "path": path})
        for path, value in (("loop", 9_990.0), ("batched", 10_020.0), ("one_pass", 50_000.0))
    ]  # fmt: skip
    write_run(suite.runs, record_of(spec, metrics, hardware=H200))
    row = suite.verdict("t2-128")
    assert row["reproduced"] == 10_020
    assert json.loads(row["parts"])["timing"] == pytest.approx(0.02)
    assert row["verdict"] == "under-powered"  # Table 2 has no other row on this GPU


def test_paired_seeds_compare_by_their_differences(suite):
    suite.train("plain", [29.0, 30.0, 31.0])
    suite.train("fancy", [26.01, 27.0, 27.99])
    row = suite.verdict("text-gap")
    assert row["reproduced"] == pytest.approx(3.0)
    # Each side scatters by 1.0, their differences by 0.01: pairs count.
    own = 0.01 / math.sqrt(3)
    printed = 0.05 / 30 * (30 + 27) / 2 * math.sqrt(2) / math.sqrt(3)
    assert json.loads(row["parts"])["seeds"] > 1.9 * math.hypot(own, printed)
    assert json.loads(row["parts"])["seeds"] < 2.1 * math.hypot(own, printed)
    assert row["verdict"] == "reproduced"
    assert row["difference_nats"] is None


def test_unpaired_sides_say_so(suite):
    suite.train("plain", [29.0, 30.0, 31.0])
    suite.train("fancy", [27.0])
    row = suite.verdict("text-gap")
    assert row["reproduced"] == pytest.approx(3.0)
    assert "no pairs" in row["note"]


@pytest.mark.parametrize("seeds", [(2,), (1, 2, 3)])
def test_unlike_tokenizers_are_not_compared(suite, seeds):
    """Neither among our own seeds nor with the paper's figure."""
    suite.train("plain", [30.0, 30.0, 30.0])
    for seed in seeds:
        spec = suite.spec("plain", seed)
        metrics = [
            m.model_copy(update={"protocol": m.protocol.model_copy(update={"tokenizer": "gpt2:1"})})
            if m.protocol
            else m
            for m in train_metrics(spec, math.log(30.0))
        ]
        write_run(suite.runs, record_of(spec, metrics), curve_of(spec, 3.4))
    row = suite.verdict("t1-plain")
    assert row["verdict"] == "not judgeable here"
    assert "tokenizer 'bpe' and 'gpt2' are unlike" in row["note"]


def test_crossover_comes_from_the_validation_curves(suite):
    for condition, shift in (("fancy-web", -1.0), ("plain-web", 0.0)):
        spec = suite.spec(condition)
        table = curve_of(spec, 3.0).to_pydict()
        for i, (step, name) in enumerate(zip(table["step"], table["name"], strict=True)):
            if name == "validation_nll" and step >= 100:
                table["value"][i] += shift
            elif name == "validation_nll":
                table["value"][i] -= shift
        write_run(suite.runs, record_of(spec, train_metrics(spec, 3.0)), pa.table(table))
    row = suite.verdict("text-cross")
    every = suite.spec("fancy-web").evaluation.every
    assert row["reproduced"] == pytest.approx(100 - every / 2)
    assert json.loads(row["parts"])["grid"] == pytest.approx(every / 2 / row["reproduced"])
    assert row["verdict"] == "under-powered"


def test_padded_figures_are_masked_and_name_the_other_rule(suite):
    conditions = suite.paper / "conditions.toml"
    padded = 'layout = { kind = "padded", chunk = 65, min_chunk = 32 }'
    packed = 'layout = { kind = "packed" }'
    conditions.write_text(conditions.read_text().replace(packed, padded, 1))
    suite.train("plain", [30.0, 30.0, 30.0])
    row = suite.verdict("t1-plain")
    assert row["reproduced"] == pytest.approx(30.0)
    assert f"with PAD counted {30.0**0.75:.4g}" in row["note"]


def test_a_crossover_that_never_comes_is_not_reproduced(suite):
    suite.train("plain-web", [20.0])
    suite.train("fancy-web", [26.0])
    row = suite.verdict("text-cross")
    assert (row["verdict"], row["reproduced"]) == ("not reproduced", None)
    assert "never stays better" in row["note"]


def test_a_record_for_cpu_at_paper_scale_judges_quality(suite):
    """Quality does not depend on the machine, so the GPU rule is for timings alone."""
    suite.train("plain", [29.96, 30.02, 30.05], hardware=CPU)
    assert suite.verdict("t1-plain")["verdict"] == "reproduced"


def test_cells_of_the_made_up_paper_are_valid():
    assert all(Cell.model_validate(cell) for cell in CELLS)


@pytest.mark.parametrize("named, crossing", [("H200", (128, 256)), ("RTX 3090", (64, 128))])
def test_a_crossover_is_read_on_one_machine(named, crossing):
    """The 3090 overtakes at 128, the H200 at 256; taking the fastest of both would say 256."""
    lengths, found = (64, 128, 256), []
    for machine, fancy in (("NVIDIA H200", (5, 5, 9)), ("NVIDIA GeForce RTX 3090", (1, 4, 4))):
        run = {"run_id": machine, "hardware": machine, "hardware_count": 1, "kind": "bench",
               "finished": 0, "seed": 0}  # fmt: skip
        for model, values in (
            ("fancy", fancy),
            ("plain", (6, 6, 6) if fancy[0] == 5 else (2,) * 3),
        ):
            found += [
                Reading(run=run, value=value, unit="token/s", stderr=None, low=None, high=None,
                        protocol=dict.fromkeys(PROTOCOL), labels={"model": model, "length": length})
                for length, value in zip(lengths, values, strict=True)
            ]  # fmt: skip
    runs = Runs(runs={}, readings={("paper", "bench", "prefill_tokens_per_s"): found})
    sides = [
        Query(name="", metric="prefill_tokens_per_s", condition="bench", labels={"model": model},
              hardware=named)
        for model in ("fancy", "plain")
    ]  # fmt: skip
    apart = lengths_apart(runs, "paper", *sides)
    assert first_that_stays(apart.points) == crossing
    assert [same_hardware(named, run) for run in apart.runs] == [True]
