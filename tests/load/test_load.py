"""The database and the report of many runs: the time grows as their number, not faster."""

import time

import pytest
from many_records import POINTS, write_records

from mol.plan.experiments import PAPER
from mol.store.export import connect
from mol.store.ingest import build

HALF, ALL = 400, 800


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for count in (0, HALF, ALL):
        made[count] = tmp_path_factory.mktemp(f"of-{count}")
        (made[count] / "runs").mkdir()
        write_records(made[count] / "runs", count)
    return made


def seconds_of(work) -> float:
    """Processor time, which other programs on the machine do not stretch."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def test_ingest_and_verdicts_grow_linearly(folders):
    def work(count):
        folder = folders[count]
        return lambda: build(folder / "mol.duckdb", folder / "runs", folder / "none", PAPER)

    seconds_of(work(0))  # imports and caches
    none, half, both = (min(seconds_of(work(n)) for _ in range(2)) for n in (0, HALF, ALL))
    with connect(folders[ALL] / "mol.duckdb") as database:
        found = database.execute(
            "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM curves)"
        ).fetchone()
    assert found == (ALL, ALL * POINTS)
    first, second = half - none, both - half
    assert second < 2 * first, (none, half, both)  # quadratic growth would give 3
    assert (both - none) / ALL < 0.02, "10,000 runs would take more than 200 s"
