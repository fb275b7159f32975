"""How a command line names a run: a specification file, or a run of the plan, and changes to it."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mol.base import UserError, checked, read_json
from mol.known import meant
from mol.plan.build import Config, find_run, read_config
from mol.plan.spec import RunSpec, ScaleName
from mol.plan.variant import leaves

RESULTS = Path("results")
SCALES = ("smoke", "proxy", "paper")
RUN_SPEC: TypeAdapter[RunSpec] = TypeAdapter(RunSpec)


def add_run_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """`--spec FILE`, or `--run NAME` of the plan at `--scale`; `--set` for changes to it; and where
    results lie. Returns the group of the former two, for what else may stand in their place."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--run", metavar="NAME", help="run_id, condition or condition-sSEED, see `mol plan`"
    )
    which.add_argument("--spec", type=Path, metavar="FILE", help="specification as JSON")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change its specification, as in model.layer.divide_by_k=false; may be repeated",
    )
    add_scale_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    return which


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """`--scale` and `--config`, the two that decide a plan."""
    parser.add_argument("--scale", choices=SCALES, help="default: the configuration's")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="default: config/config.yaml where present"
    )


def chosen_config(args: argparse.Namespace) -> Config:
    """The configuration that `--config` and `--scale` select.

    Raises UserError when the named file is absent or wrong.
    """
    default = Path("config/config.yaml")
    # A link to nothing or a folder of this name is a mistake to be told, not the default.
    path = args.config or (default if os.path.lexists(default) else None)
    config = read_config(path) if path else Config()
    return config.model_copy(update={"scale": args.scale}) if args.scale else config


def read_spec(path: Path) -> RunSpec:
    """A specification file. Raises UserError naming the file and the key."""
    try:
        raw = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; give a specification as in results/specs") from None
    return checked(RUN_SPEC, raw, path)


def changed(spec: RunSpec, changes: Sequence[str]) -> RunSpec:
    """`spec` with each "a.b=value" in its place; a value is JSON, or else text. All are made before
    the whole is checked. Raises UserError naming the key."""
    raw = spec.model_dump(mode="json")
    for change in changes:
        key, _, text = change.partition("=")
        *outer, last = key.split(".")
        inner: Any = raw
        for name in outer:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if "=" not in change or not isinstance(inner, dict) or last not in inner:
            wrong = "no such key" if "=" in change else "need KEY=VALUE"
            raise UserError(f"--set {change}: {wrong}; {meant(key, leaves(raw))}")
        try:
            inner[last] = json.loads(text)
        except (ValueError, RecursionError):
            inner[last] = text
    return checked(RUN_SPEC, raw, "--set") if changes else spec


def selected_spec(args: argparse.Namespace, kind: str) -> RunSpec:
    """The run that the command line names, which must be of `kind`."""
    if args.spec:
        spec = read_spec(args.spec)
    else:
        config = chosen_config(args)
        spec = find_run(args.run, config.scale, config, kind).spec
    if spec.kind != kind:
        raise UserError(f"{spec.run_id} is a {spec.kind} run, this command takes {kind} runs")
    return changed(spec, vars(args).get("set", ()))  # benchmarks have options of their own


def run_folder(results: Path, spec: RunSpec) -> Path:
    return results / "runs" / spec.scale / spec.run_id


def corpus_folder(results: Path, scale: ScaleName, folder: str) -> Path:
    return results / "data" / scale / folder
