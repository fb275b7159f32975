"""Two models on the same items: the difference of their scores with an interval from the pairs.

Right or wrong: exact McNemar, that is the binomial test of the items on which the two differ. Its
Clopper-Pearson interval takes their number as given, so it is widened to the normal interval,
in which that number varies too; the two agree with the test on whether 0 is left out. Other scores
(shares of probability): a t interval of the mean.
"""

import math
from dataclasses import dataclass

from scipy.special import stdtr

from mol.report.verdicts import Z, mean_half_width, sample_sd

SCORES = ("acc", "acc_norm")  # the metrics of a zero-shot task
# Item (subtask, number, content hash) -> its score.
Items = dict[tuple[str, int, str], float]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Score of one less score of the other, a fraction, with a 95 % interval, the standard error
    over `n` items, and p of no difference (NaN where one item cannot give it)."""

    value: float
    low: float
    high: float
    stderr: float
    p: float
    n: int
    method: str


def same_items(one: Items, other: Items) -> str:
    """Why two sets of scores cannot be paired, or ""."""
    if not one or not other:
        return "the items of a run were not kept"
    if one.keys() != other.keys():
        return f"unlike items ({len(one.keys() - other.keys())} of {len(one)} are not in the other)"
    return ""


def paired(one: Items, other: Items) -> Paired:
    """The difference over the items of both, which must be the same."""
    assert one.keys() == other.keys() and one, "check same_items first"
    differences = tuple(one[item] - other[item] for item in one)
    n, value = len(differences), math.fsum(differences) / len(differences)
    if set(one.values()) | set(other.values()) <= {0.0, 1.0}:
        return _mcnemar(differences.count(1.0), differences.count(-1.0), n)
    half = math.inf if n == 1 else mean_half_width(differences)
    stderr = math.nan if n == 1 else sample_sd(differences, log=False) / math.sqrt(n)
    p = 2 * float(stdtr(n - 1, -abs(value) / stderr)) if stderr > 0 else math.nan
    told = "" if math.isnan(p) else f", p = {p:.2g}"
    method = f"paired over {n:,} items, t interval of the mean difference{told}"
    return Paired(
        value=value, low=value - half, high=value + half, stderr=stderr, p=p, n=n, method=method
    )


def _mcnemar(better: int, worse: int, n: int) -> Paired:
    """`better` of `n` items only the first has right, `worse` only the second. Given that they
    differ on m items, `better` is binomial with p; the difference is (2 p - 1) m / n."""
    differing = better + worse
    value = (better - worse) / n
    if not differing:
        most = 1 - 0.025 ** (1 / n)  # share of items that may differ, had none of n
        method = f"paired over {n:,} items, which both answer alike"
        return Paired(value=0.0, low=-most, high=most, stderr=0.0, p=1.0, n=n, method=method)
    from scipy.stats import binomtest  # takes two seconds to import, and few databases hold items

    test = binomtest(better, differing)
    interval = test.proportion_ci(0.95, method="exact")
    low, high = ((2 * end - 1) * differing / n for end in interval)
    stderr = math.sqrt(differing - (better - worse) ** 2 / n) / n
    normal = Z * stderr
    low, high = max(-1.0, min(low, value - normal)), min(1.0, max(high, value + normal))
    method = (
        f"paired over {n:,} items, exact McNemar: {better} against {worse}, p = {test.pvalue:.2g}"
    )
    return Paired(
        value=value, low=low, high=high, stderr=stderr, p=float(test.pvalue), n=n, method=method
    )
