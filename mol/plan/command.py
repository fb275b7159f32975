"""`mol plan`: the runs of a scale, what they train on and what they cost."""

import argparse
import json
from pathlib import Path

from mol.base import UserError
from mol.plan.build import Planned, plan
from mol.plan.experiments import load_experiments
from mol.plan.select import RESULTS, add_scale_arguments, chosen_config

GPU = {"bandwidth": 450.0, "tflops": 400.0, "memory": 141.0}  # of --parallel, where not given


def configure(parser: argparse.ArgumentParser) -> None:
    add_scale_arguments(parser)
    parser.add_argument("--experiment", metavar="ID", help="only this one, for example E06")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="whose records tell the cost; default: results",
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    add_parallel_arguments(parser)


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """One run on several GPUs; the speeds' sources are in docs/distributed.md."""
    group = parser.add_argument_group("one run on several GPUs")
    group.add_argument("--parallel", type=int, metavar="N", help="plan --run on N GPUs")
    group.add_argument("--run", metavar="NAME", help="run_id or condition to plan on them")
    for name, unit, what in (
        ("bandwidth", "GB/S", "sent by one"),
        ("tflops", "TFLOPS", "of one GPU, as reached"),
        ("memory", "GB", "of one GPU"),
    ):
        told = f"{what}; default: {GPU[name]:g}"
        group.add_argument(f"--{name}", type=float, metavar=unit, help=told)


def row(planned: Planned) -> dict:
    """One run as a flat row; tokens and training operations (6 per active weight and token)."""
    spec = planned.spec
    found = {
        "run_id": planned.run_id,
        "kind": spec.kind,
        "scale": spec.scale,
        "condition": spec.condition,
        "seed": spec.seed,
        "experiments": list(planned.experiments),
    }
    if spec.kind != "train":
        return found
    from mol.model.counts import active_parameters, total_parameters

    active = active_parameters(spec.model, "with_delta_extras")
    return found | {
        "corpus": spec.data.corpus,
        "source": spec.data.source.kind,
        "steps": spec.optim.steps,
        "tokens": spec.tokens,
        "params_total": total_parameters(spec.model),
        "params_active": active,
        "train_flop": 6 * active * spec.tokens,
    }


def run(args: argparse.Namespace) -> int:
    if args.parallel is not None:
        from mol.plan.parallel import run as plan_parallel

        for name, value in GPU.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        return plan_parallel(args)
    for name in ("run", *GPU):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} plans one run on several GPUs: add --parallel N")
    config = chosen_config(args)
    runs = plan(config.scale, config)
    if args.experiment is not None:
        known = load_experiments().experiments
        if args.experiment not in known:
            raise UserError(f"--experiment {args.experiment!r}: known are {', '.join(known)}")
        runs = [planned for planned in runs if args.experiment in planned.experiments]
    rows = [row(planned) for planned in runs]
    priced = _priced(runs, args.results) if config.scale != "smoke" else {}
    for item in rows:
        item |= _cost_of(priced.get(item["run_id"]))
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    head = f"{'run':44}{'experiments':20}{'steps':>8}{'tokens':>16}{'weights':>15}{'active':>15}"
    print(head + (f"{'GPU-hours':>24}" if priced else ""))
    for item in rows:
        figures = (item.get(key) for key in ("steps", "tokens", "params_total", "params_active"))
        columns = zip(figures, (8, 16, 15, 15), strict=True)
        text = "".join(f"{figure:>{width},}" for figure, width in columns if figure is not None)
        cost = _cost_text(priced.get(item["run_id"]))
        print(f"{item['run_id']:44}{' '.join(item['experiments']):20}{text}{cost}".rstrip())
    operations = sum(item.get("train_flop", 0) for item in rows)
    print(f"scale {config.scale}: {len(rows)} runs, {operations:.3g} training operations in all")
    if priced:
        _print_sums(runs, priced)
    return 0


def _priced(runs: list[Planned], results: Path) -> dict:
    from mol.plan.cost import costs

    if not results.is_dir() and (results != RESULTS or results.exists()):
        raise UserError(f"--results {results}: no folder; name one that holds runs or records")
    return costs(runs, results)


def _cost_of(cost) -> dict:
    """A run's cost as columns of its row; nothing where none is asked for."""
    if cost is None:
        return {}
    return {
        "done": cost.done,
        "gpu_hours": cost.hours,
        "tokens_per_s": cost.speed and cost.speed.tokens_per_s,
        "measured_on": cost.speed and cost.speed.gpu,
        "measured_by": cost.speed and cost.speed.run_id,
        "paper_gpu_hours": cost.paper,
    }


def _cost_text(cost) -> str:
    if cost is None:
        return ""
    text = "not run, " + ("not measured" if cost.hours is None else f"{cost.hours:,.2f}")
    text = f"{'done' if cost.done else text:>24}"
    return text if cost.paper is None else f"{text}  (paper {cost.paper:,.1f})"


def _print_sums(runs: list[Planned], priced: dict) -> None:
    """By experiment, in which a run counts wherever it is used; then each run once, those that one
    GPU trains apart from those that several train together."""
    from mol.plan.cost import summary

    runs = [run for run in runs if run.run_id in priced]
    groups = {
        name: [r for r in runs if name in r.experiments] for name in load_experiments().experiments
    }
    counts = sorted({run.gpus for run in runs})
    if len(counts) > 1:
        groups |= {f"on {n} GPU{'s' * (n > 1)}": [r for r in runs if r.gpus == n] for n in counts}
    for name, found in (groups | {"all": runs}).items():
        if found:
            print(f"  {name}: {summary(priced[run.run_id] for run in found)}")
    if all(cost.speed is None for cost in priced.values()):
        print(
            "no record of a GPU holds a speed: `mol bench train-step` or a training run gives one"
        )
