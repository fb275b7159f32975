"""Perplexity with its unit, PAD rule, context, stride and split; every token scored once.

Shapes: B sequences, T tokens of context, D width, E routed blocks, k chosen ones.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from mol.base import UserError
from mol.data.loader import eval_sequences
from mol.data.tokenizers import load_token_bytes, load_tokenizer
from mol.model.config import ModelConfig, SplitLayer
from mol.ops.collectives import of_all_ranks, rank, world
from mol.ops.cross_entropy import linear_cross_entropy
from mol.store.record import Metric, Protocol

GAPS = ("gap_sum", "gap_pairs", "block_gap_sum", "block_gaps", "covered")  # sums of a layer
HIGHEST = 700.0  # nats whose exponential is still a number


@dataclass
class Tally:
    """Sums over the scored targets; nats. `real` leaves PAD targets out, `all` counts them."""

    nll_real: float = 0.0
    n_real: int = 0
    nll_all: float = 0.0
    n_all: int = 0
    sequences: int = 0
    per_sequence: list[tuple[float, int]] = field(default_factory=list)
    gap_sum: float = 0.0
    gap_pairs: int = 0
    block_gap_sum: float = 0.0
    block_gaps: int = 0
    covered: float = 0.0
    coverages: int = 0

    def add_gaps(self, layers: list[torch.Tensor]) -> None:
        """Add what `inter_token_gaps` found in each layer, read from the GPU once."""
        for name, value in zip(GAPS, torch.stack(layers).sum(0).tolist(), strict=True):
            held = getattr(self, name)
            setattr(self, name, held + type(held)(value))
        self.coverages += len(layers)

    def together(self) -> "Tally":
        """Of all ranks, when rank r of W has scored sequences r, r + W, ...: the sum of their
        tallies, values of sequences in the order of these."""
        every = of_all_ranks(self)
        rows = zip_longest(*(tally.per_sequence for tally in every))
        in_turn = [value for row in rows for value in row if value is not None]
        sums = {
            name: sum(getattr(tally, name) for tally in every)
            for name in vars(self)
            if name != "per_sequence"
        }
        return Tally(**sums, per_sequence=in_turn)


def inter_token_gaps(route_BTk: torch.Tensor, real_BT: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """Distance in positions between consecutive real tokens of one block (3.1): the sums `GAPS`,
    fp64 on the tensors' device, [5].

    Averaged two ways, since the paper does not say which: over all pairs of consecutive tokens
    (equal loads at density k/E give E/k), and over blocks, where a nearly idle block weighs as
    much as a busy one.
    """
    B, T, _ = route_BTk.shape
    chosen_BTE = torch.zeros(B, T, n_blocks, dtype=torch.bool, device=route_BTk.device)
    chosen_BTE.scatter_(2, route_BTk, True)
    chosen_BTE &= real_BT[..., None]
    count_BE = chosen_BTE.sum(1)
    position_T = torch.arange(T, device=route_BTk.device)[:, None]
    last_BE = torch.where(chosen_BTE, position_T, -1).amax(1)
    first_BE = torch.where(chosen_BTE, position_T, T).amin(1)
    several_BE = count_BE > 1
    pairs_BE = torch.where(several_BE, count_BE - 1, 0)
    span_BE = torch.where(several_BE, last_BE - first_BE, 0)
    sums = (
        span_BE.sum(),
        pairs_BE.sum(),
        (span_BE.double() / pairs_BE.clamp(min=1)).sum(),
        several_BE.sum(),
        count_BE.sum().double() / (n_blocks * real_BT.sum()),
    )
    return torch.stack([part.double() for part in sums])


def routed_blocks(config: ModelConfig) -> list[int]:
    """Routed blocks of each layer that reports its routes."""
    split = (layer for layer in config.layers() if isinstance(layer, SplitLayer))
    return [layer.n_routed for layer in split if layer.chooses]


def scoring_batch(context: int, device: torch.device) -> int:
    """Sequences scored at once: 16,384 tokens, or 65,536 on a GPU, which would wait for the host's
    launches. No figure depends on it beyond rounding."""
    return max(1, (65_536 if device.type == "cuda" else 16_384) // context)


@torch.no_grad()
def score(
    model,
    sequences: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    batch_size: int,
    device: torch.device,
    bf16: bool = False,
) -> tuple[Tally, list[np.ndarray]]:
    """Score (inputs_T, targets_T, real_T) sequences; also returns each one's real target ids.

    Of several processes each scores every W-th sequence, and the tally is that of all; target ids
    are those of this rank's own. All make as many forward passes, which FSDP2 waits for: one with
    nothing left to score does the first one's sequence again and forgets it.
    """
    tally, targets = Tally(), []
    blocks = routed_blocks(model.config)
    was_training = model.training
    model.eval()
    group = []

    def flush() -> None:
        mine = group[rank() :: world()] or group[:1]
        counts = len(group) > rank()
        kept = [torch.stack(part) for part in zip(*mine, strict=True)]
        inputs, labels, real = (part.to(device) for part in kept)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = model(inputs)
            nll = linear_cross_entropy(
                output.hidden.flatten(0, 1), model.embedding.weight, labels.flatten()
            )
        group.clear()
        if not counts:
            return
        nll_BT = nll.view(labels.shape).double()
        real_B = (nll_BT * real).sum(1).tolist()
        counts_B = real.sum(1).tolist()
        tally.per_sequence += zip(real_B, counts_B, strict=True)
        tally.nll_real += sum(real_B)
        tally.n_real += sum(counts_B)
        tally.nll_all += float(nll_BT.sum())
        tally.n_all += nll_BT.numel()
        tally.sequences += len(mine)
        routes = zip(output.routes, blocks, strict=True)
        gaps = [inter_token_gaps(route_BTk, real, n_blocks) for route_BTk, n_blocks in routes]
        if gaps:
            tally.add_gaps(gaps)
        _, labels, real = kept
        targets.extend(row[mask].numpy() for row, mask in zip(labels, real, strict=True))

    for sequence in sequences:
        group.append(sequence)
        if len(group) == batch_size * world():
            flush()
    if group:
        flush()
    model.train(was_training)
    return tally.together(), targets


def mean_and_error(tally: Tally) -> tuple[float, float | None]:
    """Nats per real token, and the standard error of that ratio over sequences."""
    mean = tally.nll_real / tally.n_real
    if tally.sequences < 2:
        return mean, None
    residual = sum((nll - mean * n) ** 2 for nll, n in tally.per_sequence)
    n = tally.sequences
    return mean, math.sqrt(residual * n / (n - 1)) / tally.n_real


def text_size(folder: Path, targets: list[np.ndarray]) -> tuple[int, int]:
    """Bytes and whitespace-separated words of the scored tokens, those of all ranks together. A
    word cut by a sequence boundary counts on both sides."""
    tokenizer = load_tokenizer(folder)
    token_bytes = load_token_bytes(folder, tokenizer)
    texts = tokenizer.decode_batch([ids.tolist() for ids in targets])
    n_bytes = sum(int(token_bytes[ids].sum()) for ids in targets)
    every = of_all_ranks((n_bytes, sum(len(text.split()) for text in texts)))
    n_bytes, n_words = map(sum, zip(*every, strict=True))
    return n_bytes, n_words


def perplexity_metrics(tally: Tally, size: tuple[int, int], protocol: Protocol) -> list[Metric]:
    """Token-, word- and byte-level figures of the real targets; `size` is (bytes, words). Text
    that is written without spaces has no perplexity a word that a number holds, and gets none.
    Raises UserError for a loss that no perplexity holds."""
    nll, error = mean_and_error(tally)
    if not nll < HIGHEST:
        raise UserError(f"loss of {nll:.4g} nats a token: the weights diverged; lower optim.lr")
    n_bytes, n_words = size
    per_word = tally.nll_real / n_words if n_words else math.inf
    bits = tally.nll_real / math.log(2) / n_bytes

    def metric(name: str, value: float, unit: str, n: int, stderr: float | None = None) -> Metric:
        return Metric(name=name, value=value, unit=unit, n=n, stderr=stderr, protocol=protocol)

    return [
        metric("nll", nll, "nat/token", tally.n_real, error),
        metric("ppl", math.exp(nll), "ppl/token", tally.n_real, error and math.exp(nll) * error),
        *(
            [metric("ppl_word", math.exp(per_word), "ppl/word", n_words)]
            if per_word < HIGHEST
            else []
        ),
        metric("bits_per_byte", bits, "bit/byte", n_bytes),
    ]


def _routing_metrics(tally: Tally, split: str) -> list[Metric]:
    if not tally.gap_pairs:
        return []
    labels = {"split": split}
    gap = tally.gap_sum / tally.gap_pairs
    by_block = tally.block_gap_sum / tally.block_gaps
    coverage = tally.covered / tally.coverages
    return [
        Metric(name="inter_token_gap", value=gap, unit="token", n=tally.gap_pairs, labels=labels),
        Metric(
            name="inter_token_gap_by_block",
            value=by_block,
            unit="token",
            n=tally.block_gaps,
            labels=labels,
        ),
        Metric(name="coverage", value=coverage, unit="fraction", labels=labels),
    ]


def evaluate_split(
    model,
    folder: Path,
    split: str,
    seq_len: int,
    limit: int | None,
    batch_size: int,
    device: torch.device,
    tokenizer: str,
    padded: bool,
    bf16: bool = False,
) -> list[Metric]:
    """Every perplexity figure of one split, each with its protocol and counts.

    `tokenizer` is the protocol's name for it. Padded data give two figures, with PAD targets
    masked and counted, which are never to be compared with one another.
    """
    sequences = eval_sequences(folder, split, seq_len, limit)
    tally, targets = score(model, sequences, batch_size, device, bf16)

    def protocol(pad: str) -> Protocol:
        return Protocol(
            tokenizer=tokenizer,
            pad=pad,
            layout="chunked" if padded else "stream",
            context=seq_len,
            stride=seq_len,
            split=split,
        )

    plain = protocol("masked" if padded else "none")
    metrics = perplexity_metrics(tally, text_size(folder, targets), plain)
    if padded:
        nll = tally.nll_all / tally.n_all
        counted = {"n": tally.n_all, "protocol": protocol("pad_counted")}
        metrics += [
            Metric(name="nll", value=nll, unit="nat/token", **counted),
            Metric(name="ppl", value=math.exp(nll), unit="ppl/token", **counted),
        ]
    return metrics + _routing_metrics(tally, split)
