"""Timings in milliseconds: CUDA events on a GPU, the monotonic clock on a CPU."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch

from mol.store.record import Metric

Labels = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one call, in ms, in the order they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    def duration(self, name: str, unit: str, labels: Labels) -> Metric:
        """The median as a metric in `unit` ("ms" or "ms/token", one token a call)."""
        return _metric(name, unit, self.median, self.samples, labels)

    def rate(self, name: str, tokens: int, labels: Labels, mean: bool = False) -> Metric:
        """`tokens` a call as tokens a second at the median (or mean) time."""
        rates = [1e3 * tokens / ms for ms in self.samples]
        middle = self.mean if mean else self.median
        return _metric(name, "token/s", 1e3 * tokens / middle, rates, labels)

    def over(self, other: "Timing", name: str, labels: Labels) -> Metric:
        """Ratio of the medians; the spread is that of the pairs, which were taken side by side."""
        ratios = [mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True)]
        return _metric(name, "ratio", self.median / other.median, ratios, labels)


def _metric(name: str, unit: str, value: float, samples, labels: Labels) -> Metric:
    n = len(samples)
    return Metric(
        name=name,
        value=value,
        unit=unit,
        n=n,
        stderr=statistics.stdev(samples) / sqrt(n) if n > 1 else None,
        low=min(samples),
        high=max(samples),
        labels=labels,
    )


def measure(fn: Callable, warmup: int, repeats: int, device: torch.device) -> Timing:
    """Time `repeats` calls of `fn` after `warmup` calls that are not counted."""
    return interleave({"fn": fn}, warmup, repeats, device)["fn"]


def interleave(
    fns: dict[str, Callable], warmup: int, repeats: int, device: torch.device
) -> dict[str, Timing]:
    """Time several calls in turn (A B A B ...), so that a drift of the clock or of the load
    falls on all of them alike. Use it wherever a ratio of times is reported."""
    for _ in range(warmup):
        for fn in fns.values():
            fn()
    once = _once_cuda if device.type == "cuda" else _once_cpu
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            samples[name].append(once(fn))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def _once_cpu(fn: Callable) -> float:
    start = time.perf_counter()
    fn()
    return 1e3 * (time.perf_counter() - start)


def _once_cuda(fn: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def watch_memory(device: torch.device) -> None:
    """Start counting what tensors hold on the GPU, for `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device, labels: Labels) -> list[Metric]:
    """Largest number of bytes that tensors held on the GPU since `watch_memory`, weights
    included. Empty on a CPU, where the allocator keeps no such count."""
    if device.type != "cuda":
        return []
    torch.cuda.synchronize()
    value = torch.cuda.max_memory_allocated(device)
    return [Metric(name="peak_memory", value=value, unit="byte", labels=labels)]
