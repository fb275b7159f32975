"""Perplexity of one trained model by each way to compute its split stages (5.6).

The ways are the same function but for rounding, which may turn a route where two scores are close;
the paper reports a change of -0.11 % between its two.
"""

import math
from contextlib import nullcontext
from pathlib import Path

import torch

from mol.data.loader import eval_sequences
from mol.evaluate.perplexity import Tally, mean_and_error, score, scoring_batch
from mol.model.batched import batched
from mol.model.config import ModelConfig, SplitLayer
from mol.model.paths import loop, stages_by
from mol.ops.collectives import world
from mol.store.record import Metric

SEQUENCES = 64
FIRST = "loop"  # what the others are compared with
OTHERS = {"batched": batched, "one_pass": None}


def computed_in_several_ways(config: ModelConfig) -> bool:
    """Whether tokens choose among the routed blocks of any layer, and every way can compute them
    (weights that are spread over processes can be computed in one way only)."""
    split = [layer for layer in config.layers() if isinstance(layer, SplitLayer)]
    routed = any(s.coverage == "routed" and s.top_k < s.n_routed for s in split)
    return routed and all(s.rank1 is None for s in split) and world() == 1


def path_metrics(
    model, corpus: Path, seq_len: int, limit: int | None, device: torch.device, bf16: bool
) -> list[Metric]:
    """`path_ppl` of the first validation sequences by each path, and `path_ppl_change` as a share
    of the loop's, with the standard error of the paired difference over sequences."""
    limit = min(SEQUENCES, limit or SEQUENCES)

    def tally_by(path) -> Tally:
        sequences = eval_sequences(corpus, "validation", seq_len, limit)
        with stages_by(model, path) if path else nullcontext():
            return score(model, sequences, scoring_batch(seq_len, device), device, bf16)[0]

    first = tally_by(loop)
    found = [_ppl(first, FIRST)]
    for name, path in OTHERS.items():
        tally = tally_by(path)
        found += [_ppl(tally, name), _change(tally, first, name)]
    return found


def _ppl(tally: Tally, path: str) -> Metric:
    nll, error = mean_and_error(tally)
    return Metric(
        name="path_ppl",
        value=math.exp(nll),
        unit="ppl/token",
        n=tally.n_real,
        stderr=error and math.exp(nll) * error,
        labels={"path": path, "split": "validation"},
    )


def _change(tally: Tally, first: Tally, path: str) -> Metric:
    pairs = zip(tally.per_sequence, first.per_sequence, strict=True)
    paired = Tally(
        nll_real=tally.nll_real - first.nll_real,
        n_real=first.n_real,
        sequences=first.sequences,
        per_sequence=[(mine - theirs, n) for (mine, n), (theirs, _) in pairs],
    )
    difference, error = mean_and_error(paired)
    return Metric(
        name="path_ppl_change",
        value=math.expm1(difference),
        unit="fraction",
        n=first.n_real,
        stderr=error and error * math.exp(difference),
        labels={"path": path, "over": FIRST, "split": "validation"},
    )
