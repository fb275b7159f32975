"""Does a text occur in the training split? By runs of 13 normalized words."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mol.data.meta import check_split, check_tokenizer, load_meta
from mol.data.ngrams import SHORTEST, N, ngrams, words
from mol.data.tokenizers import load_tokenizer

BLOCK = 1 << 20  # tokens decoded at a time
OVERHANG = 16 * N  # tokens decoded again with the next block: the longest run that is not missed


def overlap(texts: Iterable[str], folder: Path) -> list[int]:
    """Indices of the `texts` that share a run of 13 words with the training split of `folder`
    (a prepared corpus): what zero-shot must not score. Texts of 8 to 12 words match as a whole;
    shorter ones are never reported.

    The n-grams of `texts` are held in memory and the shard is decoded in blocks past them. Full
    rows of the padded layout are joined to the next one, so a run that a row boundary cuts is
    found as well; words that were dropped with a short tail were never trained on and do not count.
    """
    grams = [ngrams(text) for text in texts]
    wanted = set().union(*grams)
    # Nearly every place of the shard is settled by its first words, whatever the lengths wanted.
    lengths: dict[str, set[int]] = {}
    for gram in wanted:
        found = gram.split(" ")
        lengths.setdefault(" ".join(found[:SHORTEST]), set()).add(len(found))
    seen: set[str] = set()
    for block in _training_words(Path(folder)) if wanted else ():
        for i in range(len(block) - SHORTEST + 1):
            for n in lengths.get(" ".join(block[i : i + SHORTEST]), ()):
                seen.add(" ".join(block[i : i + n]))
    return [i for i, gram in enumerate(grams) if gram & seen]


def _training_words(folder: Path) -> Iterator[list[str]]:
    meta = load_meta(folder)
    check_tokenizer(folder, meta)
    ids = np.memmap(check_split(folder, meta, "train"), dtype="<u2", mode="r")
    tokenizer = load_tokenizer(folder)
    for start in range(0, len(ids), BLOCK):
        part = ids[max(0, start - OVERHANG) : start + BLOCK]
        # PAD and end-of-text are spelled out as a word: no run goes across documents.
        yield words(tokenizer.decode(part.tolist(), skip_special_tokens=False))
