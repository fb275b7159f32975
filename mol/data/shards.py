"""Token shards, written in bounded memory.

The PAD rule. Padded layout: a paragraph is cut into rows of `chunk` tokens; a last piece shorter
than `min_chunk` is dropped, a longer one is filled up with PAD at its end. Inputs are row[:-1] and
targets row[1:], so T = chunk - 1; a target is real unless it is PAD, and no text encodes to PAD.
The packed layout has no PAD: every document is followed by one end-of-text token.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mol.base import UserError, sha256_file
from mol.data.config import PackedLayout, PaddedLayout
from mol.data.meta import SplitMeta

BATCH_TEXTS, BATCH_CHARACTERS = 512, 1 << 21  # encoded together; the larger bounds memory
DTYPE = np.dtype("<u2")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == BATCH_TEXTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            yield text, np.array(encoding.ids, dtype=DTYPE)


class ShardWriter:
    """Encodes texts and writes one split's shard, counting what went in."""

    def __init__(self, path: Path, tokenizer: Tokenizer, sizes_V: np.ndarray):
        self.path, self.tokenizer, self.sizes_V = path, tokenizer, sizes_V
        self.tokens = self.real_tokens = self.words = self.bytes = self.documents = 0

    def _count(self, text: str, ids: np.ndarray, kept: int) -> None:
        """Note that the first `kept` tokens of `text` went in."""
        if kept < len(ids):
            text = self.tokenizer.decode(ids[:kept].tolist())
        self.documents += 1
        self.words += len(text.split())
        self.bytes += int(self.sizes_V[ids[:kept]].sum())

    def padded(self, texts: Iterable[str], layout: PaddedLayout, pad: int, limit: int | None):
        """Rows of `layout.chunk` tokens until `limit` positions are written."""
        rows_left = limit // layout.chunk if limit is not None else None
        paragraphs = (line for text in texts for line in text.splitlines() if line.strip())
        with open(self.path, "wb") as handle:
            for text, ids in _encoded(paragraphs, self.tokenizer):
                rows, tail = divmod(len(ids), layout.chunk)
                rows += tail >= layout.min_chunk
                rows = rows if rows_left is None else min(rows, rows_left)
                if not rows:
                    if rows_left == 0:
                        break
                    continue
                kept = min(len(ids), rows * layout.chunk)
                block = np.full(rows * layout.chunk, pad, dtype=DTYPE)
                block[:kept] = ids[:kept]
                handle.write(block.tobytes())
                self._count(text, ids, kept)
                self.tokens += len(block)
                self.real_tokens += kept
                if rows_left is not None:
                    rows_left -= rows

    def packed(self, texts: Iterable[str], eos: int, limit: int | None):
        """One stream, cut at `limit` tokens."""
        with open(self.path, "wb") as handle:
            for text, ids in _encoded(texts, self.tokenizer):
                room = len(ids) + 1 if limit is None else min(len(ids) + 1, limit - self.tokens)
                if room <= 0:
                    break
                handle.write(np.append(ids, DTYPE.type(eos))[:room].tobytes())
                self._count(text, ids, min(len(ids), room))
                self.tokens += room
        self.real_tokens = self.tokens

    def meta(self, chunk: int | None) -> SplitMeta:
        return SplitMeta(
            file=self.path.name,
            sha256=sha256_file(self.path),
            sequences=self.tokens // chunk if chunk else None,
            tokens=self.tokens,
            real_tokens=self.real_tokens,
            words=self.words,
            bytes=self.bytes,
            documents=self.documents,
        )


def write_shard(
    path: Path,
    split: str,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    sizes_V: np.ndarray,
    layout: PaddedLayout | PackedLayout,
    ids: tuple[int | None, int | None],
    limit: int | None,
) -> SplitMeta:
    """Write one split; `ids` are PAD and end-of-text, `limit` the most positions, `sizes_V` the
    bytes of each token. UserError if the text does not give one sequence."""
    pad, eos = ids
    writer = ShardWriter(path, tokenizer, sizes_V)
    if isinstance(layout, PaddedLayout):
        writer.padded(texts, layout, pad, limit)
        chunk, needed = layout.chunk, "no paragraph has min_chunk = " + str(layout.min_chunk)
    else:
        writer.packed(texts, eos, limit)
        chunk, needed = None, "the stream has fewer than 2"
    if writer.tokens < 2:
        raise UserError(
            f"{split} split: too little text, {needed} tokens; "
            "give more text (own files: also one for validation and test)"
        )
    return writer.meta(chunk)
