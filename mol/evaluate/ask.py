"""What the harness would ask a model, as pairs of token ids, and how many tokens that is."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from mol.base import UserError
from mol.data.meta import check_tokenizer, load_meta
from mol.data.tokenizers import load_tokenizer
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.items import ItemSets, load_index, load_sets
from mol.evaluate.pairs import Collector, Head, write_pairs
from mol.evaluate.scoring import Pair, cost, shortened
from mol.evaluate.tasks import SETS, check_tasks, load_stock_tasks
from mol.evaluate.trained import open_run
from mol.plan.spec import ZeroShotSpec


class Prepared(NamedTuple):
    """Items and a tokenizer, of which the harness's requests are made."""

    loaded: ItemSets
    names: tuple[str, ...]  # tasks whose items are there
    tokenizer: Tokenizer
    tokenizer_sha256: str
    prefix_token: int


def prepared(names: tuple[str, ...], items: Path, corpus: Path) -> Prepared:
    """The items of the tasks `names` and the tokenizer of a prepared corpus.

    Raises UserError when the tokenizer or all items are absent or wrong.
    """
    check_tasks(names)
    meta = load_meta(corpus)
    check_tokenizer(corpus, meta)
    if meta.eos_id is None:
        raise UserError(f"{corpus}: its tokenizer has no end-of-text token to condition on")
    loaded = load_sets(items, load_index(items), tuple(SETS[name] for name in names))
    left = tuple(name for name in names if SETS[name] not in loaded.missing)
    if not left:
        raise UserError(f"no task is left: {next(iter(loaded.missing.values()))}")
    return Prepared(loaded, left, load_tokenizer(corpus), meta.tokenizer_sha256, meta.eos_id)


def asked(found: Prepared, limit: int | None, max_length: int) -> dict[str, list[Pair]]:
    """Task -> its pairs, in the harness's order."""
    stock = load_stock_tasks(found.names, found.loaded.tables, limit)
    of_task = {}
    for name in found.names:
        collector = Collector(max_length)
        model = HarnessModel(collector, found.tokenizer, prefix_token=found.prefix_token)
        for task in stock.members(name):
            task.build_all_requests(tokenizer_name=model.tokenizer_name)
            model.loglikelihood(task.instances)
        of_task[name] = collector.pairs
    return of_task


def collect(
    spec: ZeroShotSpec, results: Path, items: Path, corpus: Path | None, out: Path
) -> list[str]:
    """Write the pairs of `spec` to `out`; returns lines on what each task costs.

    `corpus` is a prepared folder with the model's tokenizer where the run itself is not at hand.
    Raises UserError when the tokenizer or all items are absent or wrong.
    """
    found = prepared(spec.tasks, items, corpus or open_run(spec, results).corpus)
    loaded = found.loaded
    of_task = asked(found, spec.limit, spec.max_length)
    head = Head(
        tokenizer_sha256=found.tokenizer_sha256,
        tasks=found.names,
        limit=spec.limit,
        items={
            f"{name} {split}": file.items_sha256
            for name, files in loaded.files.items()
            for split, file in files.items()
        },
    )
    pairs = [pair for of_name in of_task.values() for pair in of_name]
    write_pairs(out, pairs, head)
    fed = {n: [shortened(*p, spec.max_length) for p in of_name] for n, of_name in of_task.items()}
    lines = [cost_line(name, of_name) for name, of_name in fed.items()]
    lines.append(cost_line("all", [pair for of_name in fed.values() for pair in of_name]))
    lines += [f"{name}: not run, {reason}" for name, reason in loaded.missing.items()]
    return [*lines, f"{out}: {out.stat().st_size / 1e6:.1f} MB"]


def cost_line(name: str, pairs: Sequence[Pair]) -> str:
    """Tokens that a model is fed for these pairs, with contexts shared and without."""
    shared, alone = cost(pairs)
    return (
        f"{name}: {len(pairs):,} requests, {shared:,} tokens with shared contexts, "
        f"{alone:,} without ({alone / shared:.2f} times)"
    )
