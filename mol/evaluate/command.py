"""`mol eval`: perplexity of a trained run, with its unit, PAD rule, context, stride and split."""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.table import Table

from mol.base import UserError
from mol.data.meta import load_meta
from mol.evaluate.perplexity import (
    Protocol,
    evaluate_split,
    perplexity_metrics,
    score,
    scoring_batch,
    text_size,
)
from mol.evaluate.protocols import matrix_of
from mol.evaluate.windows import real_stream, stream_windows
from mol.model.transformer import LanguageModel
from mol.plan.select import add_run_arguments, corpus_folder, run_folder, selected_spec
from mol.plan.spec import TrainSpec
from mol.store.matrix import Matrix, save_matrix
from mol.store.record import Metric, Record, load_record
from mol.terminal import console
from mol.train.checkpoint import load_weights
from mol.train.environment import hardware, pick_device, provenance
from mol.train.run import data_hashes, tokenizer_name

MOST = 2**40  # sequences or tokens


def configure(parser: argparse.ArgumentParser) -> None:
    which = add_run_arguments(parser)
    which.add_argument(
        "--calibrate", action="store_true", help="public GPT-2 small against published figures"
    )
    parser.add_argument("--gpt2", metavar="FOLDER", help="with --calibrate: instead of the hub's")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="with --calibrate: wiki.test.raw, not the hub's"
    )
    parser.add_argument(
        "--lambada", type=Path, metavar="FILE", help="with --calibrate: LAMBADA as JSON lines"
    )
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--limit", type=int, metavar="N", help="sequences or windows; default all")
    parser.add_argument(
        "--stride",
        type=int,
        help="score the split as one stream of real tokens in windows that move on by STRIDE; "
        "left out: the sequences the run was trained on",
    )
    parser.add_argument("--context", type=int, help="window length, with --stride")
    parser.add_argument(
        "--protocols",
        action="store_true",
        help="score under every protocol: PAD, layout, context, stride, end-of-text, raw text; "
        "the text is that of the run's own evaluation unless --limit says otherwise",
    )
    parser.add_argument(
        "--save", action="store_true", help="with --protocols: write protocols.json for the store"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print a list of metrics")


def _check(args: argparse.Namespace) -> None:
    if args.context is not None and args.stride is None:
        raise UserError("--context goes with --stride")
    if args.protocols and args.stride is not None:
        raise UserError("--protocols takes every context and stride; leave --stride out")
    if args.save and not args.protocols:
        raise UserError("--save goes with --protocols; a run's own figures are in its record")
    for name in ("limit", "stride", "context"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= MOST:
            raise UserError(f"--{name} {value}: must be from 1 to {MOST:,}")


def _strided(model, corpus, spec, args, device, tokenizer) -> list[Metric]:
    context = args.context or spec.seq_len
    windows = stream_windows(real_stream(corpus, args.split), context, args.stride, args.limit)
    bf16 = spec.precision == "bf16"
    tally, targets = score(model, windows, scoring_batch(context, device), device, bf16)
    protocol = Protocol(
        tokenizer=tokenizer,
        pad="none",
        layout="stream",
        context=context,
        stride=args.stride,
        split=args.split,
    )
    return perplexity_metrics(tally, text_size(corpus, targets), protocol)


def _every_protocol(
    model, corpus: Path, spec: TrainSpec, args: argparse.Namespace, device: torch.device
) -> tuple[list[Metric], list[str]]:
    """Rows of the matrix and what to say below them; with --save also written to the run."""
    folder = run_folder(args.results, spec)
    record = _record(folder) if args.save else None
    start = time.monotonic()
    limit = args.limit or spec.evaluation.final_sequences
    rows, no_raw_text = matrix_of(
        model, corpus, spec.seq_len, args.split, limit, device, spec.precision == "bf16"
    )
    notes = [f"raw text: {no_raw_text}"] if no_raw_text else []
    if record:
        matrix = Matrix(
            run_id=record.run_id,
            trained=record.finished,
            seconds=time.monotonic() - start,
            hardware=hardware(device),
            provenance=provenance("protocols", data_hashes(load_meta(corpus))),
            rows=tuple(rows),
            no_raw_text=no_raw_text,
        )
        notes.append(f"written to {save_matrix(folder, matrix)}")
    return rows, notes


def _record(folder: Path) -> Record:
    if not (folder / "record.json").is_file():
        raise UserError(f"{folder / 'record.json'}: missing; --save needs a finished run")
    return load_record(folder / "record.json")


def _calibrate(args: argparse.Namespace) -> int:
    from mol.evaluate.calibrate import GPT2, REPORTED, calibrate, save_calibration

    found = calibrate(args.gpt2 or GPT2, args.text, args.lambada, pick_device(args.device), True)
    path = save_calibration(args.results, found)
    if args.json:
        print(found.model_dump_json(indent=1))
        return 0
    for row in found.rows:
        mark = "agrees" if row.agrees else "DIFFERS"
        print(
            f"{row.protocol:15} {row.value:8.4f} {row.unit:9} (n = {row.n:,}; published "
            f"{row.published} +- {row.tolerance}: {mark})"
        )
    if any(row.protocol == "word_rolling" for row in found.rows):
        print(f"beside word_rolling: {REPORTED} in the GPT-2 report, protocol not spelled out")
    print(found.reason)
    print(f"written to {path}")
    return 0


def run(args: argparse.Namespace) -> int:
    if args.calibrate:
        for name in ("limit", "stride", "context", "protocols", "save"):
            if getattr(args, name):
                raise UserError(f"--{name} is of a run; --calibrate scores GPT-2, leave it out")
        return _calibrate(args)
    if args.gpt2 or args.text or args.lambada:
        raise UserError("--gpt2, --text and --lambada go with --calibrate")
    spec = selected_spec(args, "train")
    _check(args)
    corpus = corpus_folder(args.results, spec.scale, spec.data.folder)
    meta = load_meta(corpus)
    device = pick_device(args.device)
    with torch.device(device):
        model = LanguageModel(spec.model)
    folder = run_folder(args.results, spec)
    load_weights(folder, model, meta.tokenizer_sha256, spec.run_id)
    tokenizer = tokenizer_name(meta)
    notes: list[str] = []
    if args.protocols:
        metrics, notes = _every_protocol(model, corpus, spec, args, device)
    elif args.stride:
        metrics = _strided(model, corpus, spec, args, device, tokenizer)
    else:
        metrics = evaluate_split(
            model,
            corpus,
            args.split,
            spec.seq_len,
            args.limit,
            scoring_batch(spec.seq_len, device),
            device,
            tokenizer,
            spec.data.layout.kind == "padded",
            spec.precision == "bf16",
        )
    if args.json:
        print(json.dumps([metric.model_dump(mode="json") for metric in metrics], indent=1))
        return 0
    _print(f"{spec.run_id}, {args.split}", metrics, notes)
    return 0


def _print(title: str, metrics: list[Metric], notes: list[str]) -> None:
    table = Table(title=title)
    protocol = ("PAD", "layout", "context", "stride", "eos", "text")
    for heading in ("metric", "value", "± stderr", "n", "unit", *protocol, "note"):
        table.add_column(heading)
    for m in metrics:
        p = m.protocol
        rule = (p.pad, p.layout, str(p.context), str(p.stride), p.eos, p.text) if p else [""] * 6
        error = f"{m.stderr:.4g}" if m.stderr else ""
        note = getattr(m, "note", "")
        table.add_row(m.name, f"{m.value:.4f}", error, str(m.n or ""), m.unit, *rule, note)
    out = console()
    out.print(table)
    for note in notes:
        out.print(note)
