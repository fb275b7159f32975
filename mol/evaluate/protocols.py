"""One checkpoint under every protocol that a printed perplexity may have been computed by.

All rows score the same text, that of the first sequences of the split; what differs is which of
its tokens count, how it is laid out, and how much of it the model sees before each token.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from mol.base import UserError
from mol.data.config import DataSpec, WheelSource
from mol.data.detokenize import plain_line
from mol.data.meta import CorpusMeta, Split, check_split, load_meta
from mol.data.shards import write_shard
from mol.data.sources import open_text
from mol.data.tokenizers import load_token_bytes, load_tokenizer
from mol.evaluate.perplexity import Tally, perplexity_metrics, scoring_batch
from mol.evaluate.windows import piece_windows
from mol.ops.cross_entropy import linear_cross_entropy
from mol.store.matrix import MatrixRow
from mol.store.record import Protocol
from mol.train.run import tokenizer_name

RECORDED, LONGER = "as in the record", "longer than trained"
NO_RAW_TEXT = "not applicable: the source has none"
RAW_MARKS = (" @-@ ", " @,@ ", " @.@ ")


@dataclass(frozen=True)
class Reading:
    """A way to lay the text out. Each piece, int64 [n], is read alone and all of it but its first
    token is scored; `parts` are the same tokens by paragraph or document, to count words in."""

    layout: str
    pieces: tuple[np.ndarray, ...]
    parts: tuple[np.ndarray, ...]
    eos_added: bool = False  # between the rows of a corpus whose stream has none of its own


@dataclass(frozen=True)
class Scored:
    """Every target once: its id, its nats, and the stretch of text it belongs to, whose targets
    are not independent."""

    targets: np.ndarray
    nats: np.ndarray
    cluster: np.ndarray


def padded_readings(rows: np.ndarray, pad: int, eos: int | None) -> list[Reading]:
    """Readings of padded rows [n, chunk]: as trained, joined, and joined with end-of-text."""
    real = [row[row != pad] for row in rows]
    alone = tuple(text[1:] for text in real)
    joined = (real[0][1:], *real[1:])
    readings = [
        Reading("chunked", tuple(rows), alone),
        Reading("stream", (np.concatenate(real),), joined),
    ]
    if eos is not None:
        # The shards do not keep where a paragraph of several rows ends, so each row ends a text.
        marked = np.concatenate([np.append(text, eos) for text in real])[:-1]
        readings.append(Reading("stream", (marked,), joined, eos_added=True))
    return readings


def packed_readings(stream: np.ndarray, eos: int) -> list[Reading]:
    """Readings of a packed stream [n]: as trained, and each document alone with its end."""
    documents = np.split(stream, np.flatnonzero(stream[:-1] == eos) + 1)
    joined = (documents[0][1:], *documents[1:])
    alone = tuple(document[1:] for document in documents)
    return [Reading("stream", (stream,), joined), Reading("documents", tuple(documents), alone)]


def grid(reading: Reading, trained: int) -> Iterator[tuple[int, int]]:
    """(context, stride) pairs: the trained context without overlap, with half an overlap and in
    steps of an eighth (a smaller stride would cost as many passes more); its half and its quarter
    without overlap; for a stream also its double.

    Where one window holds each piece, strides do not matter. A stream with added end-of-text,
    which the model never met in training, is read at the trained context alone.
    """
    one_window = all(len(piece) <= trained + 1 for piece in reading.pieces)
    parts = (1,) if one_window or reading.eos_added else (1, 2, 8)
    for stride in dict.fromkeys(max(1, trained // part) for part in parts):
        yield trained, stride
    if reading.eos_added:
        return
    for context in dict.fromkeys(max(1, trained // part) for part in (2, 4)):
        yield context, context
    if reading.layout == "stream" and len(reading.pieces[0]) > 2 * trained:
        yield 2 * trained, 2 * trained


@torch.no_grad()
def score_reading(
    model,
    reading: Reading,
    context: int,
    stride: int,
    device: torch.device,
    bf16: bool = False,
    cluster: int | None = None,
) -> Scored:
    """Nats of every target, in windows of `context` that move on by `stride` through each piece.

    A stream's clusters are `cluster` targets long (default `context`), those of other layouts
    are its pieces.
    """
    pending, targets, nats, clusters = [], [], [], []
    was_training = model.training
    model.eval()

    def flush() -> None:
        inputs, labels, scored = (
            torch.stack(part).to(device) for part in zip(*pending, strict=True)
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            # The head only where it scores: it costs most, and overlaps are read many times.
            hidden_ND = model(inputs).hidden[scored]
            nats_N = linear_cross_entropy(hidden_ND, model.embedding.weight, labels[scored])
        targets.append(labels[scored].cpu().numpy())
        nats.append(nats_N.double().cpu().numpy())
        pending.clear()

    for number, piece in enumerate(reading.pieces):
        places = np.arange(len(piece) - 1) // (cluster or context)
        clusters.append(places if reading.layout == "stream" else np.full(len(piece) - 1, number))
        for window in piece_windows(piece, context, stride):
            pending.append(window)
            if len(pending) == scoring_batch(context, device):
                flush()
    if pending:
        flush()
    model.train(was_training)
    found = Scored(np.concatenate(targets), np.concatenate(nats), np.concatenate(clusters))
    expected = np.concatenate([piece[1:] for piece in reading.pieces])
    assert np.array_equal(found.targets, expected), "every token is scored once, in order"
    return found


def _metrics(
    scored: Scored, keep: np.ndarray, size: tuple[int, int], protocol: Protocol, note: str
) -> list[MatrixRow]:
    """The figures of the targets in `keep`; `size` is (bytes, words) of their text."""
    nats, cluster = scored.nats[keep], scored.cluster[keep]
    sums, counts = np.bincount(cluster, nats), np.bincount(cluster)
    filled = counts > 0
    tally = Tally(
        nll_real=float(nats.sum()),
        n_real=len(nats),
        sequences=int(filled.sum()),
        per_sequence=list(zip(sums[filled].tolist(), counts[filled].tolist(), strict=True)),
    )
    metrics = perplexity_metrics(tally, size, protocol)
    if protocol.pad == "pad_counted":  # PAD is neither word nor byte
        metrics = [metric for metric in metrics if metric.unit.endswith("/token")]
    return [MatrixRow(**dict(metric), note=note) for metric in metrics]


class Matrix:
    """Scores readings of one corpus with one model; `rows` holds what came out."""

    def __init__(self, model, corpus: Path, trained: int, split: Split, device, bf16: bool):
        self.model, self.trained, self.split = model, trained, split
        self.device, self.bf16 = device, bf16
        self.meta = load_meta(corpus)
        self.tokenizer = load_tokenizer(corpus)
        self.sizes_V = load_token_bytes(corpus, self.tokenizer)
        self.rows: list[MatrixRow] = []

    def readings(self, ids: np.ndarray, limit: int | None) -> list[Reading]:
        """Readings of the first `limit` sequences of a shard, the trained one first."""
        meta, layout = self.meta, self.meta.spec.layout
        if layout.kind == "padded":
            rows = ids.reshape(-1, layout.chunk)[:limit]
            return padded_readings(rows, meta.pad_id, meta.eos_id)
        return packed_readings(ids[: limit and limit * self.trained + 1], meta.eos_id)

    def score(self, reading: Reading, context: int, stride: int, text: str = "prepared") -> None:
        """Append the rows of one reading: PAD masked and counted, or end-of-text scored and not."""
        scored = score_reading(
            self.model, reading, context, stride, self.device, self.bf16, self.trained
        )
        padded = self.meta.spec.layout.kind == "padded"
        everything = np.ones(len(scored.nats), dtype=bool)
        end = scored.targets == self.meta.eos_id
        cases: list[tuple[str, str, np.ndarray]] = []  # PAD rule, eos rule, what counts
        if reading.layout == "chunked":
            cases.append(("masked", "as_prepared", scored.targets != self.meta.pad_id))
            cases.append(("pad_counted", "as_prepared", everything))
        elif padded:
            rule = "masked" if reading.eos_added else "as_prepared"
            cases.append(("none", rule, ~end if reading.eos_added else everything))
        else:
            cases.append(("none", "as_prepared", everything))
            cases.append(("none", "masked", ~end))
        decoded = self.tokenizer.decode_batch([part.tolist() for part in reading.parts])
        n_bytes = int(self.sizes_V[scored.targets].sum())
        assert n_bytes == sum(int(self.sizes_V[part].sum()) for part in reading.parts)
        size = n_bytes, sum(len(part.split()) for part in decoded)
        for pad, eos, keep in cases:
            protocol = Protocol(
                tokenizer=tokenizer_name(self.meta),
                pad=pad,
                layout=reading.layout,
                context=context,
                stride=stride,
                split=self.split,
                eos=eos,
                text=text,
            )
            self.rows += _metrics(scored, keep, size, protocol, self._note(protocol))

    def _note(self, protocol: Protocol) -> str:
        if protocol.context > self.trained:
            return LONGER
        layout = "chunked" if self.meta.spec.layout.kind == "padded" else "stream"
        windows = (protocol.layout, protocol.context, protocol.stride)
        recorded = windows == (layout, self.trained, self.trained)
        prepared = (protocol.eos, protocol.text) == ("as_prepared", "prepared")
        return RECORDED if recorded and prepared else ""


def matrix_of(
    model,
    corpus: Path,
    trained: int,
    split: Split,
    limit: int | None,
    device: torch.device,
    bf16: bool = False,
) -> tuple[list[MatrixRow], str]:
    """The whole matrix of a split's first `limit` sequences, and why it has no rows for the text
    as published (empty where it has). `trained` is the sequence length of training.

    Raises UserError for a damaged corpus folder.
    """
    matrix = Matrix(model, corpus, trained, split, device, bf16)
    ids = np.fromfile(check_split(corpus, matrix.meta, split), dtype="<u2").astype(np.int64)
    for reading in matrix.readings(ids, limit):
        for context, stride in grid(reading, trained):
            matrix.score(reading, context, stride)
    try:
        raw = raw_shard(matrix.meta, matrix.tokenizer, matrix.sizes_V, split, limit, trained)
    except UserError as error:
        return matrix.rows, str(error)
    matrix.score(matrix.readings(raw, limit)[0], trained, trained, text="raw")
    return matrix.rows, ""


def raw_shard(
    meta: CorpusMeta,
    tokenizer: Tokenizer,
    sizes_V: np.ndarray,
    split: Split,
    limit: int | None,
    trained: int,
) -> np.ndarray:
    """Ids of the split's lines as published (" @-@ " and all), laid out as the corpus is.

    Raises UserError where the corpus has no such text, or its source cannot be had.
    """
    spec = meta.spec
    if spec.corpus != "wikitext103" or isinstance(spec.source, WheelSource):
        raise UserError(NO_RAW_TEXT)
    lines = [line.strip() for line in _raw_lines(spec, split)]
    if not any(mark in line for line in lines for mark in RAW_MARKS):
        raise UserError(NO_RAW_TEXT)
    padded = spec.layout.kind == "padded"
    tokens = limit and (limit * spec.layout.chunk if padded else limit * trained + 1)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "raw.bin"
        ids = (meta.pad_id, meta.eos_id)
        most = tokens or spec.max_eval_tokens
        write_shard(path, split, lines, tokenizer, sizes_V, spec.layout, ids, most)
        return np.fromfile(path, dtype="<u2").astype(np.int64)


def _raw_lines(spec: DataSpec, split: Split) -> Iterator[str]:
    """The lines that preparation keeps, before it makes them plain."""
    for document in open_text(spec).documents(split):
        yield from (line for line in document.splitlines() if plain_line(line) is not None)
