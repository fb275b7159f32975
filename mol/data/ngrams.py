"""Runs of normalized words, by which texts are compared."""

import re

N = 13  # words; the length GPT-3's decontamination settled on
SHORTEST = 8  # words; below that a match says nothing


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits; bracketed tags such as "[step]" are dropped, since
    the scorers drop them too."""
    return re.findall(r"[^\W_]+", re.sub(r"\[[^\]]*\]", " ", text.lower()))


def runs(found: list[str], n: int) -> set[str]:
    """All runs of `n` words, joined by spaces."""
    return {" ".join(found[i : i + n]) for i in range(len(found) - n + 1)}


def ngrams(text: str) -> set[str]:
    """All runs of 13 words; of a text of 8 to 12 words the whole; of a shorter one nothing."""
    found = words(text)
    n = min(N, len(found))
    return set() if n < SHORTEST else runs(found, n)
