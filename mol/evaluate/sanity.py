"""Scores that are known beforehand: an oracle's, equal logits', and what random weights must give.

Equal logits give every option -tokens log V: the shortest wins and equally short ones tie. The
harness then takes the first, so its score depends on where the answers stand; the expectation with
ties broken at random does not, and random weights, which break them by noise, are held against it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from lm_eval.api.task import ConfigurableTask
from tokenizers import Tokenizer

from mol.base import UserError
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.items import ItemFile
from mol.evaluate.scoring import Pair, Score, Scorer
from mol.evaluate.tasks import StockTasks
from mol.evaluate.zero_shot import score
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel
from mol.store.samples import OTHER

MISS = -1e3  # nats of what the oracle was not told
TIE = 1e-9  # relative: equal quotients of whole numbers, up to rounding


class Uniform:
    """Every token is equally likely everywhere."""

    def __init__(self, vocab_size: int, max_length: int):
        self.vocab_size, self.max_length, self.cut = vocab_size, max_length, 0

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        return [(-len(option) * math.log(self.vocab_size), False) for _, option in pairs]


class Oracle:
    """Was told which pairs are right."""

    def __init__(self, right: set[Pair], max_length: int):
        self.right, self.max_length, self.cut = right, max_length, 0

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        known = ((tuple(context), tuple(option)) in self.right for context, option in pairs)
        return [(0.0, True) if told else (MISS, False) for told in known]


@dataclass(frozen=True)
class Asked:
    """One item: its requests as the harness orders them, their options' texts, the right ones."""

    pairs: tuple[Pair, ...]
    lengths: tuple[int, ...]  # characters of the options, as acc_norm divides by them
    right: tuple[int, ...]


class Expected(NamedTuple):
    """Equal logits' exact score, with ties broken at random and as the harness does (the first
    wins, or what rounding makes of equal quotients); the standard error of the former over items;
    items with a tie; and what an oracle scores."""

    value: float
    first: float
    stderr: float
    ties: int
    n: int
    told: float


class Row(NamedTuple):
    """One line of the table: a metric under one model, and what it had to be."""

    task: str
    metric: str
    model: str
    value: float
    expected: float
    z: float | None  # None: must be equal
    holds: bool


def right_options(name: str, doc: dict) -> tuple[int, ...]:
    """Places of the right options, from the item's own columns."""
    if name == "truthfulqa_mc2":
        return tuple(i for i, label in enumerate(doc["mc2_targets"]["labels"]) if label)
    place = {
        "hellaswag": lambda: int(doc["label"]),
        "piqa": lambda: doc["label"],
        "winogrande": lambda: int(doc["answer"]) - 1,
        "truthfulqa_mc1": lambda: 0,
        "mmlu": lambda: doc["answer"],
    }
    if name.startswith("arc_"):
        return (doc["choices"]["label"].index(doc["answerKey"]),)
    return (place[name](),)


def asked_items(name: str, tasks: Sequence[ConfigurableTask], model: HarnessModel) -> list[Asked]:
    """The items of one task in the harness's order."""
    found = []
    for task in tasks:
        task.build_all_requests()
        of_doc: dict[int, list] = {}
        for instance in task.instances:
            of_doc.setdefault(instance.doc_id, []).append(instance)
        for group in of_doc.values():
            doc = group[0].doc
            pairs = [model._encode_pair(*instance.args) for instance in group]
            found.append(
                Asked(
                    tuple((tuple(context), tuple(option)) for context, option in pairs),
                    tuple(len(choice) for choice in task.doc_to_choice(doc)),
                    right_options(name, doc),
                )
            )
    return found


def expected(name: str, metric: str, items: Sequence[Asked], vocab_size: int) -> Expected:
    """What equal logits score, from the options' counts of tokens (and characters) alone, and what
    an oracle does."""
    at_random, first, told, ties = [], [], [], 0
    for item in items:
        tokens = [len(option) for _, option in item.pairs]
        # TruthfulQA has questions of which one answer is listed as right and as wrong.
        right = {item.pairs[place] for place in item.right}
        known = [place for place, pair in enumerate(item.pairs) if pair in right]
        if name == "truthfulqa_mc2":
            told.append(len(item.right) / len(known))
            weights = [math.exp(-n * math.log(vocab_size)) for n in tokens]
            at_random.append(sum(weights[i] for i in item.right) / sum(weights))
            first.append(at_random[-1])
            continue
        lengths = item.lengths if metric == "acc_norm" else [1] * len(tokens)
        costs = [
            n * math.log(vocab_size) / length for n, length in zip(tokens, lengths, strict=True)
        ]
        best = [i for i, cost in enumerate(costs) if cost <= min(costs) * (1 + TIE)]
        ties += len(best) > 1
        at_random.append(len(set(best) & set(item.right)) / len(best))
        first.append(float(costs.index(min(costs)) in item.right))
        told.append(float(known[0] in item.right))
    mean, n = statistics.fmean(at_random), len(items)
    spread = math.sqrt(mean * (1 - mean))
    if name == "truthfulqa_mc2":
        spread = statistics.pstdev(at_random)
    stderr = spread / math.sqrt(n)
    return Expected(mean, statistics.fmean(first), stderr, ties, n, statistics.fmean(told))


def bootstrap_stderr(groups: Sequence[Sequence[float]], draws: int = 1000, seed: int = 0) -> float:
    """Standard error of the mean over all values, by redrawing items within their group."""
    random = np.random.default_rng(seed)
    sums = np.zeros(draws)
    for group in groups:
        values = np.asarray(group)
        sums += values[random.integers(0, len(values), (draws, len(values)))].sum(1)
    return float(sums.std(ddof=1) / sum(len(group) for group in groups))


def random_model(vocab_size: int, seed: int, max_length: int) -> Scorer:
    """A small model with random weights."""
    torch.manual_seed(seed)
    layer = DenseLayer(n_heads=2, d_ff=64)
    config = ModelConfig(vocab_size=vocab_size, d_model=32, n_layers=2, layer=layer)
    return Scorer(LanguageModel(config).eval(), max_length=max_length, batch_tokens=2048)


def sanity_rows(
    stock: StockTasks,
    names: Sequence[str],
    files: dict[str, dict[str, ItemFile]],
    tokenizer: Tokenizer,
    prefix_token: int,
    max_length: int,
    seeds: Sequence[int] = (1, 2, 3),
) -> tuple[list[Row], dict[tuple[str, str], Expected]]:
    """Every metric under an oracle (must be 1, but for items whose wrong options repeat a right
    one), equal logits (must equal the expectation with the first of equals) and random weights
    (must lie within 3 standard errors of the other one)."""

    def harness(scorer) -> HarnessModel:
        return HarnessModel(scorer, tokenizer, prefix_token=prefix_token)

    size = tokenizer.get_vocab_size()
    uniform = harness(Uniform(size, max_length))
    items = {name: asked_items(name, stock.members(name), uniform) for name in names}
    right = {
        item.pairs[place] for of_task in items.values() for item in of_task for place in item.right
    }
    models = {"oracle": harness(Oracle(right, max_length)), "equal logits": uniform}
    models |= {f"random, seed {s}": harness(random_model(size, s, max_length)) for s in seeds}
    wanted: dict[tuple[str, str], Expected] = {}
    rows = []
    for label, model in models.items():
        for metric in score(model, stock, names, files).metrics:
            name = metric.labels["task"].removesuffix(f" {OTHER}")
            key = name, metric.name
            if key not in wanted:
                wanted[key] = expected(*key, items[name], size)
            rows.append(_row(key, label, metric.value, wanted[key]))
    return rows, wanted


def _row(key: tuple[str, str], label: str, value: float, wanted: Expected) -> Row:
    if label.startswith("random"):
        if not wanted.stderr:
            raise UserError(f"{key[0]}: its items are too few to have a spread; raise --limit")
        z = (value - wanted.value) / wanted.stderr
        return Row(*key, label, value, wanted.value, z, abs(z) <= 3)
    must = wanted.told if label == "oracle" else wanted.first
    return Row(*key, label, value, must, None, math.isclose(value, must, abs_tol=1e-9))
