"""The fastest way of each model at each length, whichever library and path it took: what the
paper's own way of running, by which alone its numbers are judged, leaves unused."""

from collections import defaultdict
from typing import Any

from mol.report.query import HIGHER_IS_BETTER, machine_of

Row = dict[str, Any]
LENGTH = {"prefill_tokens_per_s": "length", "decode_ms": "context"}  # by which label
WAYS = ("path", "attention", "mode")


def fastest(runs: list[Row]) -> dict[str, Any]:
    """A row a length (and batch, machine, scale) at which two models were timed, with each model's
    best figure, how it ran, and its speed over that of the first model; empty without any. Small
    scales are left out beside the paper's."""
    of: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for run in runs:
        for metric in run["metrics"]:
            labels, name = metric["labels"], metric["name"]
            # A step without its cache is the base of an uplift, no way to decode.
            if name not in LENGTH or labels.get("cache") is False:
                continue
            place = labels[LENGTH[name]], labels.get("batch", 1)
            key = list(LENGTH).index(name), run["scale"], *machine_of(run), *reversed(place)
            models = of[key]
            found = {"run": run, "metric": metric, "how": _how(labels)}
            best = models.setdefault(labels["model"], found)
            if _faster(metric, best["metric"]) > 1:
                models[labels["model"]] = found
    of = {key: models for key, models in of.items() if len(models) > 1}
    if any(key[1] == "paper" for key in of):
        of = {key: models for key, models in of.items() if key[1] == "paper"}
    names = list(dict.fromkeys(name for models in of.values() for name in models))
    return {"models": names, "rows": [_row(key, of[key], names) for key in sorted(of)]}


def _faster(one: Row, other: Row) -> float:
    """How many times as fast the first figure is."""
    ratio = one["value"] / other["value"]
    return ratio if one["unit"] in HIGHER_IS_BETTER else 1 / ratio


def _how(labels: Row) -> str:
    """Path, attention and mode in words, but for a dense model's path, which it cannot choose."""
    kept = (str(labels[way]) for way in WAYS if labels.get(way) not in (None, "dense", "none"))
    return ", ".join(kept).replace("_", " ")


def _row(key: tuple, models: dict[str, Row], names: list[str]) -> Row:
    number, scale, hardware, _, batch, length = key
    first = models.get(names[0])
    cells = []
    for name in names:
        found = models.get(name)
        ratio = _faster(found["metric"], first["metric"]) if found and first else None
        cells.append(found and found | {"ratio": ratio if name != names[0] else None})
    return {
        "what": list(LENGTH)[number].partition("_")[0],
        "scale": scale,
        "hardware": hardware,
        "length": length,
        "batch": batch,
        "cells": cells,
    }
