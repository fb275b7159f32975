"""`mol status`: which runs of the plan are complete, broken or missing."""

import argparse
import json
from collections import Counter
from pathlib import Path

from mol.base import UserError, visible
from mol.plan.build import plan
from mol.plan.select import RESULTS, add_scale_arguments, chosen_config, run_folder
from mol.store.record import load_record


def configure(parser: argparse.ArgumentParser) -> None:
    add_scale_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    parser.add_argument("--json", action="store_true", help="print a list of rows")


def state_of(folder: Path) -> tuple[str, str]:
    """(complete | not run | interrupted | broken | missing, detail) of a run's folder."""
    record = folder / "record.json"
    if record.is_file():
        try:
            found = load_record(record)
        except UserError as error:
            return "broken", str(error)
        return found.status, found.reason or ""
    if (folder / "state.pt").is_file():
        return "interrupted", "resumes from its checkpoint"
    return "missing", ""


def run(args: argparse.Namespace) -> int:
    config = chosen_config(args)
    rows = []
    for planned in plan(config.scale, config):
        state, detail = state_of(run_folder(args.results, planned.spec))
        experiments = list(planned.experiments)
        rows.append(
            {"run_id": planned.run_id, "experiments": experiments, "state": state, "detail": detail}
        )
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for item in rows:
        if item["state"] != "complete":
            print(f"{item['state']:12}{item['run_id']}  {visible(item['detail'])}".rstrip())
    counts = Counter(item["state"] for item in rows)
    print(f"scale {config.scale}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    return 0
