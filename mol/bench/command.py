"""`mol bench`: one benchmark of the plan by its run, or a program with arguments of one's own."""

import argparse
import sys
from pathlib import Path
from typing import Any

from mol.base import UserError
from mol.plan.build import Planned, plan
from mol.plan.select import RESULTS, add_scale_arguments, chosen_config, run_folder, selected_spec
from mol.plan.spec import BenchSpec, TrainSpec
from mol.store.record import Record, save_record

PROGRAMS = ("prefill", "decode", "attention", "dispatch", "logit-diff", "sharding", "train-step")

# Where --lengths goes; `seq_len` takes a single one.
LENGTHS = {
    "prefill": "lengths",
    "decode": "contexts",
    "attention": "lengths",
    "dispatch": "seq_len",
    "logit_diff": "seq_len",
    "train_step": "seq_len",
}
# A program without such an argument refuses the option, by its configuration.
OPTIONS = (
    "device", "dtype", "warmup", "repeats", "batch_size", "paths", "run_as",
    "devices",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs="?", choices=PROGRAMS)
    parser.add_argument("--run", metavar="NAME", help="a benchmark of the plan, unchanged")
    parser.add_argument("--spec", type=Path, metavar="FILE", help="specification as JSON")
    add_scale_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--models", nargs="+", metavar="CONDITION", help="only these of the plan's")
    parser.add_argument("--condition", help="the condition that train-step times")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--lengths", nargs="+", type=int, metavar="T", help="tokens or contexts")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--warmup", type=int, help="calls before timing starts")
    parser.add_argument("--repeats", type=int, help="timed calls")
    parser.add_argument(
        "--paths", nargs="+", metavar="PATH", help="prefill: one_pass, loop, batched"
    )
    parser.add_argument(
        "--run-as",
        metavar="WAY",
        help="prefill: paper or fastest; dispatch: eager, compiled or graph",
    )
    parser.add_argument("--devices", type=int, help="sharding: how many devices")
    parser.add_argument("--json", action="store_true", help="print the record")


def run(args: argparse.Namespace) -> int:
    import torch

    from mol.bench.run import execute

    named = [way for way in ("program", "run", "spec") if getattr(args, way)]
    if len(named) != 1:
        raise UserError("name one program, or one of --run and --spec: `mol bench prefill`")
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise UserError(f"--threads {args.threads}: must be from 1 to 1,024")
    spec = _adjusted(args) if args.program else _planned(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    record = execute(spec)
    folder = run_folder(args.results, spec)
    save_record(folder, record)
    if args.json:
        print(record.model_dump_json(indent=1))
    else:
        _show(record, folder)
    return 0


def _planned(args: argparse.Namespace) -> BenchSpec:
    given = [o for o in (*OPTIONS, "lengths", "models", "condition") if vars(args)[o] is not None]
    if given:
        option = given[0].replace("_", "-")
        raise UserError(f"--run and --spec bring their own arguments; drop --{option}")
    return selected_spec(args, "bench")


def _adjusted(args: argparse.Namespace) -> BenchSpec:
    """The plan's first benchmark with this program, with the options given in its place."""
    program = args.program.replace("-", "_")
    if program == "train_step":
        base = _train_step(args)
    elif args.condition:
        raise UserError("--condition belongs to train-step; choose models with --models")
    else:
        specs = (run.spec for run in _plan(args))
        base = next(s for s in specs if s.kind == "bench" and s.bench.program == program)
    arguments: dict[str, Any] = base.bench.model_dump()
    arguments |= {o: vars(args)[o] for o in OPTIONS if vars(args)[o] is not None}
    if args.lengths:
        arguments |= _lengths(program, args.lengths)
    if args.models:
        known = arguments.get("models", {})
        missing = [slug for slug in args.models if slug not in known]
        if missing:
            raise UserError(f"--models: {missing[0]!r} is none of {', '.join(known) or 'none'}")
        arguments["models"] = {slug: known[slug] for slug in args.models}
    return BenchSpec(scale=base.scale, condition=base.condition, bench=arguments, seed=base.seed)


def _plan(args: argparse.Namespace) -> list[Planned]:
    config = chosen_config(args)
    return plan(config.scale, config)


def _lengths(program: str, lengths: list[int]) -> dict[str, Any]:
    if program not in LENGTHS:
        raise UserError(f"--lengths: {program} takes no lengths")
    if LENGTHS[program] != "seq_len":
        return {LENGTHS[program]: lengths}
    if len(lengths) > 1:
        raise UserError(f"--lengths: {program} takes one length, got {len(lengths)}")
    return {"seq_len": lengths[0]}


def _train_step(args: argparse.Namespace) -> BenchSpec:
    """Shapes and precision of the condition's training run at this scale."""
    if not args.condition:
        raise UserError("train-step needs --condition, for example --condition deltanet-1p3of15")
    runs = [run.spec for run in _plan(args) if isinstance(run.spec, TrainSpec)]
    found = next((spec for spec in runs if spec.condition == args.condition), None)
    if found is None:
        raise UserError(f"--condition: the plan trains no {args.condition!r}; see `mol plan`")
    bench = {
        "program": "train_step",
        "models": {args.condition: found.model},
        "seq_len": found.seq_len,
        "batch_size": found.optim.batch_size // found.optim.accumulate,
        "dtype": found.precision,
    }
    return BenchSpec(scale=found.scale, condition="train-step", bench=bench)


def _show(record: Record, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{record.spec.condition} on {record.hardware.name}")
    for column in ("metric", "labels", "value", "unit", "low", "high"):
        table.add_column(column, justify="left" if column in ("metric", "labels") else "right")
    for m in record.metrics:
        labels = " ".join(f"{key}={value}" for key, value in m.labels.items())
        spread = ("" if x is None else f"{x:.4g}" for x in (m.low, m.high))
        table.add_row(m.name, labels, f"{m.value:.4g}", m.unit, *spread)
    console = Console(file=sys.stdout)
    console.print(table)
    for line in (*record.notes, f"record: {folder / 'record.json'}"):
        console.print(line, markup=False, soft_wrap=True)
