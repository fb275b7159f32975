"""Sliding windows over one stream of tokens, each target scored exactly once."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mol.base import UserError
from mol.data.meta import load_meta


def real_stream(folder: Path, split: str) -> np.ndarray:
    """A split's tokens as one stream, int64 [n]: PAD left out, rows joined in their order."""
    meta = load_meta(folder)
    stream = np.fromfile(folder / meta.splits[split].file, dtype=np.uint16).astype(np.int64)
    return stream if meta.pad_id is None else stream[stream != meta.pad_id]


def stream_windows(
    stream: np.ndarray, context: int, stride: int, limit: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(inputs_T, targets_T, scored_T) with T = `context`; a window moves on by `stride` and
    scores its last `stride` targets (the first window all of its own), so from the second
    window on each scored token sees at least context - stride tokens before it.

    The last window reaches back so that it is full. Raises UserError on a stride outside
    1..context or a stream shorter than one window.
    """
    if not 1 <= stride <= context:
        raise UserError(f"--stride {stride}: must lie in 1..{context}, the context")
    n_targets = len(stream) - 1
    if n_targets < context:
        raise UserError(f"--context {context}: the text has only {n_targets} targets to score")
    scored_to = 0
    windows = 0
    while scored_to < n_targets and (limit is None or windows < limit):
        end = min(n_targets, context if scored_to == 0 else scored_to + stride)
        begin = end - context
        window = torch.from_numpy(stream[begin : end + 1])
        scored = torch.arange(begin, end) >= scored_to
        yield window[:-1], window[1:], scored
        scored_to = end
        windows += 1


def piece_windows(
    piece: np.ndarray, context: int, stride: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`stream_windows` of one text read alone. A piece shorter than a window gives one, filled up
    with token 0 at its end, which no earlier position sees and nothing scores."""
    missing = context + 1 - len(piece)
    if missing <= 0:
        yield from stream_windows(piece, context, stride)
    elif len(piece) > 1:
        window = torch.from_numpy(np.pad(piece, (0, missing)))
        yield window[:-1], window[1:], torch.arange(context) < len(piece) - 1
