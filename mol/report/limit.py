"""The longest prompt that a GPU's memory holds, from how its peak grows with the length."""

from dataclasses import dataclass
from typing import Any

from mol.report.query import Query, as_printed, machine_of, matching, preferred
from mol.report.readings import Runs

GIB = 2**30


@dataclass(frozen=True)
class Limit:
    length: float  # tokens
    run: dict[str, Any]
    how: str


def memory_limit(runs: Runs, scale: str, query: Query) -> Limit | None:
    """Where the line through the peaks at the two longest lengths meets the GPU's memory; None
    without two lengths on one machine. No prompt of that length has been run: `how` says so."""
    found, _ = as_printed(runs, query, matching(runs, scale, query))
    found = [r for r in found if "length" in r.labels and r.run["device"] == "cuda"]
    if not found:
        return None
    run = preferred(query.hardware, (r.run for r in found))
    peaks = {
        int(r.labels["length"]): r.value for r in found if machine_of(r.run) == machine_of(run)
    }
    lengths = sorted(peaks)[-2:]
    if len(lengths) < 2 or peaks[lengths[0]] >= peaks[lengths[1]]:
        return None
    short, long = lengths
    a_token = (peaks[long] - peaks[short]) / (long - short)
    length = long + (run["memory_gib"] * GIB - peaks[long]) / a_token
    how = (
        f"not run, but where the line through the peaks at {short:,} and {long:,} tokens meets "
        f"{run['memory_gib']:,.0f} GiB"
    )
    return Limit(length, run, how)
