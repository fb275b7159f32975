import time

import pytest
import torch

from mol.bench.common import out_of_memory_noted
from mol.bench.timing import Timing, interleave, measure, peak_memory, watch_memory

CPU = torch.device("cpu")


def test_a_sleep_is_timed_in_milliseconds():
    timing = measure(lambda: time.sleep(0.02), warmup=0, repeats=3, device=CPU)
    assert len(timing.samples) == 3
    assert 20 <= timing.low <= timing.median <= timing.high < 200


def test_warm_up_calls_are_made_and_not_counted():
    calls = []

    def first_is_slow():
        time.sleep(0.0 if calls else 0.05)
        calls.append(1)

    timing = measure(first_is_slow, warmup=1, repeats=4, device=CPU)
    assert len(calls) == 5
    assert timing.high < 50


def test_interleaved_calls_alternate():
    order = []
    timings = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1, 3, CPU
    )
    assert order == ["a", "b"] * 4
    assert timings.keys() == {"a", "b"}


def test_rate_and_ratio_by_hand():
    slow, fast = Timing((10.0, 20.0, 40.0)), Timing((5.0, 10.0, 10.0))
    rate = slow.rate("prefill_tokens_per_s", 100, {"length": 100})
    assert (rate.value, rate.low, rate.high, rate.n) == (5000, 2500, 10_000, 3)
    ratio = slow.over(fast, "dispatch_speedup", {})
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 4.0)
    duration = slow.duration("decode_ms", "ms/token", {})
    assert duration.value == 20
    assert duration.stderr == pytest.approx(15.275 / 3**0.5, rel=1e-4)
    assert slow.mean == pytest.approx(70 / 3)


def test_one_sample_has_no_standard_error():
    assert Timing((3.0,)).duration("decode_ms", "ms/token", {}).stderr is None


def test_peak_memory_is_not_guessed_on_a_cpu():
    watch_memory(CPU)
    assert peak_memory(CPU, {}) == []


def test_out_of_memory_becomes_a_note_and_other_errors_do_not():
    notes = []
    with out_of_memory_noted(notes, "model at 8 tokens"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert notes == ["model at 8 tokens: out of GPU memory"]
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_noted(notes, "x"):
        raise RuntimeError("shapes")
