"""When a difference to a printed number is given, and in what."""

import pytest
from made_up_paper import CELLS, write_paper

from mol.paper.cell import Cell
from mol.plan.experiments import load_experiments
from mol.report.alike import compared_in

RUN = {
    "condition": "plain", "tokenizer": "bpe", "vocab_size": 1000, "hardware": "NVIDIA H200",
    "hardware_count": 1, "source": "hub",
}  # fmt: skip
BOTH, NATS, NOTHING = {"printed", "nats"}, {"nats"}, set()


@pytest.mark.parametrize(
    "cell_id, scale, change, given",
    [
        ("t1-plain", "paper", {}, BOTH),
        ("t1-plain", "proxy", {}, NATS),
        ("t1-plain", "smoke", {}, NOTHING),
        ("t1-plain", "proxy", {"source": "file"}, NOTHING),
        ("t1-plain", "paper", {"source": "wheel"}, NOTHING),
        ("t1-plain", "proxy", {"vocab_size": 500}, NOTHING),
        ("t1-plain", "paper", {"vocab_size": 500}, NOTHING),
        ("t1-plain", "paper", {"tokenizer": "gpt2"}, NOTHING),
        ("text-gap", "paper", {}, BOTH),
        ("text-gap", "proxy", {}, NOTHING),  # perplexities of another level, subtracted
        ("text-cross", "paper", {}, BOTH),
        ("text-cross", "proxy", {}, NOTHING),  # a step of a shorter training
        ("t2-128", "paper", {}, BOTH),
        ("t2-128", "proxy", {}, BOTH),
        ("t2-128", "smoke", {}, NOTHING),
        ("t2-128", "paper", {"hardware": "NVIDIA A100"}, NOTHING),
        ("t2-256", "paper", {}, NOTHING),  # printed for an RTX 3090
        ("t2-unnamed", "paper", {}, NOTHING),
    ],
)
def test_only_like_figures_are_subtracted(tmp_path, cell_id, scale, change, given):
    plan = load_experiments(write_paper(tmp_path / "paper"))
    cell = next(Cell.model_validate(row) for row in CELLS if row["cell_id"] == cell_id)
    assert compared_in(cell, scale, (RUN | change,), False, plan) == given


def test_a_timing_by_another_path_is_not_subtracted(tmp_path):
    plan = load_experiments(write_paper(tmp_path / "paper"))
    cell = next(Cell.model_validate(row) for row in CELLS if row["cell_id"] == "t2-128")
    assert compared_in(cell, "paper", (RUN,), True, plan) == NOTHING
