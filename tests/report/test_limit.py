"""The longest prompt in memory is read off the line through the two longest lengths measured."""

import pytest
from made_up_paper import CELLS, cell, write_paper
from synthetic import CPU, H200, record_of, write_run

from mol.paper.cell import Cell
from mol.store.record import Metric


def note(hardware="H200"):
    return cell(
        "t2-limit", "2", "note", "runs out above", "524K", unit="token", op="limit",
        condition="toy-prefill", labels="model=fancy;path=loop", metric="peak_memory",
        experiment="X2", hardware=hardware, n_seeds="1",
    )  # fmt: skip


def peak(length, gib, path="loop"):
    labels = {"model": "fancy", "length": length, "path": path, "mode": "eager"}
    return Metric(name="peak_memory", value=gib * 2**30, unit="byte", labels=labels)


def verdict(suite, metrics, hardware=H200, printed="H200"):
    write_paper(suite.paper, [*CELLS, note(printed)])
    write_run(suite.runs, record_of(suite.spec("toy-prefill", seed=0), metrics, hardware=hardware))
    return suite.verdict("t2-limit")


def test_the_line_through_the_two_longest_meets_the_memory(suite):
    # 1 GiB for each 1,024 tokens beyond 3,072; the shortest, held up by weights, is off the line.
    row = verdict(suite, [peak(1024, 4), peak(2048, 4.5), peak(3072, 5.5), peak(9, 90, "one_pass")])
    assert row["reproduced"] == pytest.approx(3072 + 1024 * (H200.memory_gib - 5.5))
    assert row["verdict"] == "not judgeable here"
    assert "not run, but where the line through the peaks at 2,048 and 3,072 tokens" in row["note"]


def test_without_two_lengths_that_grow_there_is_none(suite):
    assert verdict(suite, [peak(1024, 4)])["verdict"] == "not run"
    assert verdict(suite, [peak(1024, 4), peak(2048, 4)])["reproduced"] is None


def test_a_cpu_has_no_such_limit_and_another_gpu_has_its_own(suite):
    peaks = [peak(1024, 4), peak(2048, 5)]
    assert verdict(suite, peaks, CPU)["reproduced"] is None
    row = verdict(suite, peaks, printed="A100 80GB")
    assert row["note"].startswith(f"the paper's is A100 80GB, ours {H200.name}; ours is not run")
    row = verdict(suite, peaks, printed="")
    assert row["note"].startswith("the paper does not name the hardware; ours is not run")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"metric": "prefill_tokens_per_s"}, "goes with metric = peak_memory"),
        ({"versus": "model=plain"}, "op and versus come together, but for op = limit"),
        ({"unit": "GB"}, "unit 'GB' does not go with limit of peak_memory"),
    ],
)
def test_what_a_limit_is_of(change, message):
    with pytest.raises(ValueError, match=message):
        Cell.model_validate(note() | change)
