"""`mol bench`: one benchmark of the plan by its run, or a program with arguments of one's own."""

import argparse
from pathlib import Path
from typing import Any

from mol.base import UserError, alone
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
}
# A program without such an argument refuses the option, by its configuration.
OPTIONS = (
    "device", "dtype", "warmup", "repeats", "batch_size", "paths", "run_as",
    "attention", "devices", "ranks",
)  # fmt: skip

STEP_OPTIONS = ("accumulate", "checkpoint_activations")

# A shape with a public training speed, to be timed beside the conditions.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "model": {
            "vocab_size": 50257,
            "d_model": 768,
            "n_layers": 12,
            "norm": "layer",
            "layer": {"kind": "dense", "n_heads": 12, "d_ff": 3072},
        },
        "seq_len": 1024,
        "batch_size": 64,
    }
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs="?", choices=PROGRAMS)
    parser.add_argument("--run", metavar="NAME", help="a benchmark of the plan, unchanged")
    parser.add_argument("--spec", type=Path, metavar="FILE", help="specification as JSON")
    add_scale_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--models", nargs="+", metavar="CONDITION", help="only these of the plan's")
    parser.add_argument(
        "--condition", nargs="+", metavar="NAME",
        help=f"what train-step times: conditions of the plan, or {', '.join(SHAPES)}",
    )  # fmt: skip
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
        "--attention", nargs="+", metavar="BACK_END",
        help="prefill: each of cudnn, flash, efficient, flash_attn, in place of torch's choice",
    )  # fmt: skip
    parser.add_argument(
        "--run-as",
        metavar="WAY",
        help="prefill: paper or fastest; dispatch: eager, compiled or graph; "
        "train-step: eager or graph",
    )
    parser.add_argument("--accumulate", type=int, metavar="PARTS", help="train-step: micro-batches")
    parser.add_argument(
        "--checkpoint-activations", action=argparse.BooleanOptionalAction,
        help="train-step: compute layers again in the backward pass, or not",
    )  # fmt: skip
    parser.add_argument("--devices", type=int, help="sharding: how many devices")
    parser.add_argument(
        "--ranks", nargs="*", type=int, metavar="N", help="sharding: processes measured on the CPU"
    )
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
    folder = run_folder(args.results, spec)
    with alone(folder / ".lock", "runs this benchmark"):  # refused before it is timed, not after
        record = execute(spec)
        save_record(folder, record)
    if args.json:
        print(record.model_dump_json(indent=1))
    else:
        _show(record, folder)
    return 0


def _planned(args: argparse.Namespace) -> BenchSpec:
    options = (*OPTIONS, "lengths", "models", "condition", *STEP_OPTIONS)
    given = [o for o in options if vars(args)[o] is not None]
    if given:
        option = given[0].replace("_", "-")
        raise UserError(f"--run and --spec bring their own arguments; drop --{option}")
    return selected_spec(args, "bench")


def _adjusted(args: argparse.Namespace) -> BenchSpec:
    """The plan's first benchmark with this program, with the options given in its place."""
    program = args.program.replace("-", "_")
    if program == "train_step":
        return _train_step(args)
    if args.condition:
        raise UserError("--condition belongs to train-step; choose models with --models")
    if given := [o for o in STEP_OPTIONS if vars(args)[o] is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} belongs to train-step")
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
    """Shapes and precision of the conditions' training runs at this scale, or those given."""
    if not args.condition:
        raise UserError("train-step needs --condition, for example --condition deltanet-1p3of15")
    if args.models:
        raise UserError("train-step takes --condition, not --models")
    scale = chosen_config(args).scale
    trained: dict[str, TrainSpec] = {}
    for planned in _plan(args):
        if isinstance(planned.spec, TrainSpec):
            trained.setdefault(planned.spec.condition, planned.spec)
    given = {key: vars(args)[key] for key in STEP_OPTIONS if vars(args)[key] is not None}
    if args.batch_size is not None:
        given |= {"batch_size": args.batch_size, "accumulate": args.accumulate or 1}
    if args.lengths:
        if len(args.lengths) > 1:
            raise UserError(f"--lengths: train-step takes one length, got {len(args.lengths)}")
        given["seq_len"] = args.lengths[0]
    cases = {}
    for name in args.condition:
        if name not in trained and name not in SHAPES:
            raise UserError(f"--condition: the plan trains no {name!r}; see `mol plan`")
        cases[name] = (_case(trained[name]) if name in trained else SHAPES[name]) | given
    bench = {"program": "train_step", "cases": cases}
    bench |= {o: vars(args)[o] for o in OPTIONS if vars(args)[o] is not None and o != "batch_size"}
    bench.setdefault("dtype", "fp32" if scale == "smoke" else "bf16")
    return BenchSpec(scale=scale, condition="train-step", bench=bench)


def _case(spec: TrainSpec) -> dict[str, Any]:
    kept = ("batch_size", "accumulate", "checkpoint_activations")
    optim = spec.optim.model_dump(include=set(kept))
    return {"model": spec.model.model_dump(), "seq_len": spec.seq_len} | optim


def _show(record: Record, folder: Path) -> None:
    from rich.table import Table

    from mol.terminal import console

    table = Table(title=f"{record.spec.condition} on {record.hardware.name}")
    for column in ("metric", "labels", "value", "unit", "low", "high"):
        table.add_column(column, justify="left" if column in ("metric", "labels") else "right")
    for m in record.metrics:
        labels = " ".join(f"{key}={value}" for key, value in m.labels.items())
        spread = ("" if x is None else f"{x:.4g}" for x in (m.low, m.high))
        table.add_row(m.name, labels, f"{m.value:.4g}", m.unit, *spread)
    out = console()
    out.print(table)
    for line in (*record.notes, f"record: {folder / 'record.json'}"):
        out.print(line, markup=False, soft_wrap=True)
