"""Batches of token ids from a corpus folder; the state resumes exactly.

Shapes: B sequences of T tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mol.base import UserError
from mol.data.meta import CorpusMeta, Split, check_split, check_tokenizer, load_meta

Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Shard:
    """A split's shard, memory-mapped after its size, hash and tokenizer were checked."""

    def __init__(self, folder: Path, split: str, seq_len: int, tokenizer_sha256: str | None):
        self.folder = Path(folder)
        self.meta: CorpusMeta = load_meta(self.folder)
        check_tokenizer(self.folder, self.meta, tokenizer_sha256)
        path = check_split(self.folder, self.meta, split)
        self.ids = np.memmap(path, dtype="<u2", mode="r")
        self.sha256 = self.meta.splits[split].sha256
        self.seq_len = seq_len
        layout = self.meta.spec.layout
        self.padded = layout.kind == "padded"
        if self.padded and seq_len != layout.chunk - 1:
            raise UserError(
                f"{folder}: rows of {layout.chunk} tokens give seq_len {layout.chunk - 1}, "
                f"got {seq_len}"
            )
        if seq_len < 1:
            raise UserError(f"seq_len = {seq_len}: must be at least 1")
        self.stride = layout.chunk if self.padded else seq_len

    @property
    def whole(self) -> int:
        """Sequences with all their T targets."""
        return len(self.ids) // self.stride if self.padded else (len(self.ids) - 1) // self.stride

    def window(self, index: int) -> np.ndarray:
        """T + 1 ids from sequence `index`; fewer at the end of a packed stream."""
        start = index * self.stride
        return self.ids[start : start + self.seq_len + 1]

    def real(self, targets: np.ndarray) -> np.ndarray:
        return targets != self.meta.pad_id if self.padded else np.ones(targets.shape, dtype=bool)


class TokenBatches:
    """Endless batches of one split: each epoch takes every sequence once, in an order drawn from
    (seed, epoch); a batch may begin in one epoch and end in the next. The packed layout is cut
    into windows of T + 1 that overlap by one token; what does not fill a window is left out.

    With `share = (i, n)` only part i of n of each batch is read, as even as parts can be; the order
    of batches does not depend on it. `tokenizer_sha256`, if given, must be the corpus's. UserError
    for a damaged folder, a `seq_len` that padded rows do not have, a shard with less than one
    sequence and more parts than a batch has sequences.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        *,
        tokenizer_sha256: str | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        self._shard = _Shard(folder, split, seq_len, tokenizer_sha256)
        self.n = self._shard.whole
        if self.n < 1:
            raise UserError(
                f"{folder}: {len(self._shard.ids)} {split} tokens do not fill one sequence of "
                f"seq_len = {seq_len}; prepare more text or shorten seq_len"
            )
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: must be at least 1")
        part, parts = share
        if batch_size < parts:
            raise UserError(
                f"{parts} processes for batches of {batch_size} sequences: start no more processes "
                "than that, or lower optim.accumulate"
            )
        self._mine = slice(part * batch_size // parts, (part + 1) * batch_size // parts)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self._position = 0  # sequences served so far
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def epochs(self) -> float:
        """Passes over the split so far."""
        return self._position / self.n

    def _sequence(self, position: int) -> int:
        epoch, place = divmod(position, self.n)
        if not self.shuffle:
            return place
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.n)
        return int(self._order[1][place])

    def next(self) -> Sequence:
        """(inputs_BT int64, targets_BT int64, real_BT bool); real marks targets other than PAD."""
        places = range(self._position, self._position + self.batch_size)[self._mine]
        rows = np.stack([self._shard.window(self._sequence(place)) for place in places])
        self._position += self.batch_size
        real = self._shard.real(rows[:, 1:])
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.from_numpy(real)

    def _identity(self) -> dict[str, Any]:
        return {
            "shard_sha256": self._shard.sha256,
            "seq_len": self._shard.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. UserError if it belongs to another stream. The batch
        size may differ: the position counts sequences."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise UserError(
                    f"loader state: {key} was {state.get(key)!r}, now {value!r}; "
                    "resume with the data and seed of the checkpoint"
                )
        self._position = state["position"]


def eval_sequences(
    folder: Path,
    split: str,
    seq_len: int,
    limit: int | None,
    *,
    tokenizer_sha256: str | None = None,
) -> Iterator[Sequence]:
    """(inputs_T, targets_T, real_T) in file order, at most `limit`; every token after the first
    of the stream (packed) or of its row (padded) is a target exactly once. The short window at
    the end of a packed stream is kept and filled up with token 0 where real is False."""
    shard = _Shard(folder, split, seq_len, tokenizer_sha256)
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit}: must be at least 1, or left out for all")
    partial = not shard.padded and (len(shard.ids) - 1) % seq_len > 0
    total = shard.whole + partial
    for index in range(total if limit is None else min(total, limit)):
        window = shard.window(index)
        ids = torch.zeros(seq_len + 1, dtype=torch.int64)
        ids[: len(window)] = torch.from_numpy(window.astype(np.int64))
        real = torch.zeros(seq_len, dtype=torch.bool)
        real[: len(window) - 1] = torch.from_numpy(shard.real(window[1:]))
        yield ids[:-1], ids[1:], real
