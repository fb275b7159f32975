"""`mol train`: one run from specification to record."""

import argparse
from contextlib import nullcontext

import torch
from tqdm import tqdm

from mol.base import UserError, alone
from mol.data.packing import prepare
from mol.ops.collectives import rank, world
from mol.plan.select import add_run_arguments, corpus_folder, run_folder, selected_spec
from mol.plan.spec import TrainSpec
from mol.train.distributed import first_before_others, joined
from mol.train.environment import check_fits, hardware, pick_device
from mol.train.loop import Progress
from mol.train.run import execute

MOST = {"threads": 1024, "checkpoint_every": 2**40, "stop_after": 2**40}


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads; results depend on their number")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="checkpoint and leave")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print the record")


def run(args: argparse.Namespace) -> int:
    spec = selected_spec(args, "train")
    for name in MOST:
        value = getattr(args, name)
        if value is not None and not 1 <= value <= MOST[name]:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {value}: must be from 1 to {MOST[name]:,}")
    if args.threads:
        torch.set_num_threads(args.threads)
    with joined(pick_device(args.device)) as device:
        return _train(args, spec, device)


def _train(args: argparse.Namespace, spec: TrainSpec, device: torch.device) -> int:
    first = rank() == 0
    check_fits(spec, hardware(device), world())
    corpus = corpus_folder(args.results, spec.scale, spec.data.folder)
    first_before_others(lambda: prepare(spec.data, corpus))
    quiet = True if args.quiet or not first else None
    bar = tqdm(total=spec.optim.steps, disable=quiet, unit="step", desc=spec.run_id)

    def show(progress: Progress) -> None:
        bar.n = progress.step
        bar.set_postfix_str(f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} tok/s")

    folder = run_folder(args.results, spec)
    # Of several processes that train one run together, the first holds the lock for all.
    with bar, alone(folder / ".lock", "trains this run") if first else nullcontext():
        record = execute(
            spec,
            corpus,
            folder,
            device,
            checkpoint_every=args.checkpoint_every,
            stop_after=args.stop_after,
            on_step=show,
        )
    if not first:
        return 0
    if record is None:
        print(f"{spec.run_id}: step {args.stop_after} is reached; without --stop-after it goes on")
    elif args.json:
        print(record.model_dump_json(indent=1))
    else:
        ppl = next(metric for metric in record.metrics if metric.name == "ppl")
        figure = f"validation perplexity {ppl.value:.2f} (PAD {ppl.protocol.pad})"
        print(f"{spec.run_id}: {figure}, {record.wall_s:.1f} s")
    return 0
