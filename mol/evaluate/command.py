"""`mol eval`: perplexity of a trained run, with its unit, PAD rule, context, stride and split."""

import argparse
import json

import torch
from rich.console import Console
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
from mol.evaluate.windows import real_stream, stream_windows
from mol.model.transformer import LanguageModel
from mol.plan.select import add_run_arguments, corpus_folder, run_folder, selected_spec
from mol.store.record import Metric
from mol.train.checkpoint import load_weights
from mol.train.environment import pick_device
from mol.train.run import tokenizer_name


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--limit", type=int, metavar="N", help="sequences or windows; default all")
    parser.add_argument(
        "--stride",
        type=int,
        help="score the split as one stream of real tokens in windows that move on by STRIDE; "
        "left out: the sequences the run was trained on",
    )
    parser.add_argument("--context", type=int, help="window length, with --stride")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print a list of metrics")


def _strided(model, corpus, spec, args, device, tokenizer) -> list[Metric]:
    context = args.context or spec.seq_len
    windows = stream_windows(real_stream(corpus, args.split), context, args.stride, args.limit)
    bf16 = spec.precision == "bf16"
    tally, targets = score(model, windows, scoring_batch(context), device, bf16)
    protocol = Protocol(
        tokenizer=tokenizer,
        pad="none",
        layout="stream",
        context=context,
        stride=args.stride,
        split=args.split,
    )
    return perplexity_metrics(tally, text_size(corpus, targets), protocol)


def run(args: argparse.Namespace) -> int:
    spec = selected_spec(args, "train")
    if args.context and not args.stride:
        raise UserError("--context goes with --stride")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit}: must be at least 1")
    corpus = corpus_folder(args.results, spec.scale, spec.data.folder)
    meta = load_meta(corpus)
    device = pick_device(args.device)
    with torch.device(device):
        model = LanguageModel(spec.model)
    load_weights(run_folder(args.results, spec), model, meta.tokenizer_sha256)
    tokenizer = tokenizer_name(meta)
    if args.stride:
        metrics = _strided(model, corpus, spec, args, device, tokenizer)
    else:
        metrics = evaluate_split(
            model,
            corpus,
            args.split,
            spec.seq_len,
            args.limit,
            scoring_batch(spec.seq_len),
            device,
            tokenizer,
            spec.data.layout.kind == "padded",
            spec.precision == "bf16",
        )
    if args.json:
        print(json.dumps([metric.model_dump(mode="json") for metric in metrics], indent=1))
        return 0
    table = Table(title=f"{spec.run_id}, {args.split}")
    for heading in (
        "metric",
        "value",
        "± stderr",
        "n",
        "unit",
        "PAD",
        "layout",
        "context",
        "stride",
    ):
        table.add_column(heading)
    for m in metrics:
        p = m.protocol
        rule = (p.pad, p.layout, str(p.context), str(p.stride)) if p else ("", "", "", "")
        error = f"{m.stderr:.4g}" if m.stderr else ""
        table.add_row(m.name, f"{m.value:.4f}", error, str(m.n or ""), m.unit, *rule)
    Console().print(table)
    return 0
