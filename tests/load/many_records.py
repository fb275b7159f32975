"""Many made-up records, in the time of writing them, for measurements of the store and report.

From the shell: `PYTHONPATH=tests/report python tests/load/many_records.py 10000 FOLDER` writes
FOLDER/runs. No figure in them was measured.
"""

import sys
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from synthetic import H200, made_up_nll, record_of, train_metrics

from mol.plan.build import plan
from mol.plan.spec import TrainSpec

SERIES = ("train_nll", "validation_nll", "lr", "tokens_per_s", "grad_norm")
POINTS = 500  # of a run's curve


def write_records(runs_root: Path, wanted: int, scale: str = "paper") -> int:
    """Training runs of the plan, each condition with as many seeds as it takes; returns the number
    of curve points."""
    planned = [run.spec for run in plan(scale) if isinstance(run.spec, TrainSpec)]
    first = {spec.condition: spec for spec in planned}
    specs = (
        spec.model_copy(update={"seed": seed}) for seed in count(42) for spec in first.values()
    )
    for _, spec in zip(range(wanted), specs, strict=False):
        nll = made_up_nll(spec)
        record = record_of(spec, train_metrics(spec, nll), hardware=H200)
        folder = runs_root / scale / record.run_id
        folder.mkdir(parents=True)
        # Not by save_record: its syncs would take longer than all that is measured.
        (folder / "record.json").write_text(record.model_dump_json(indent=1) + "\n")
        pq.write_table(_curve(spec, nll), folder / "curve.parquet")
    return wanted * POINTS


def _curve(spec: TrainSpec, nll: float) -> pa.Table:
    steps = np.linspace(1, spec.optim.steps, POINTS // len(SERIES)).astype(np.int64)
    loss = nll + 4 * np.exp(-4 * steps / spec.optim.steps)
    tokens = steps * spec.optim.batch_size * spec.seq_len
    return pa.table(
        {
            "step": np.tile(steps, len(SERIES)),
            "tokens": np.tile(tokens, len(SERIES)),
            "name": np.repeat(SERIES, len(steps)),
            "value": np.tile(loss, len(SERIES)),
        }
    )


if __name__ == "__main__":
    print(write_records(Path(sys.argv[2]) / "runs", int(sys.argv[1])), "points")
