"""Log-probabilities of continuations, in length-sorted batches; options that share a context share
its computation. Imports neither lm-eval nor a tokenizer: pairs are token ids.

Shapes: B sequences of a batch, T their padded length, D model width, V vocabulary,
N scored positions of a batch. Padding stands on the right, where a causal model cannot see it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from mol.base import UserError

LOGIT_ROWS = 512  # rows of [N, V] logits alive at once: 100 MB in fp32 for GPT-2's vocabulary

Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]  # context, continuation
Score = tuple[float, bool]  # nats, whether greedy decoding gives the continuation


class Forward(Protocol):
    """What scoring needs of a model, besides being callable. One that can also branch has
    `new_cache(batch, max_len)`, `forward(ids_BT, cache)` that continues what the cache holds, and
    `cache.branch(parent_B)`."""

    def __call__(self, ids_BT: Tensor) -> Any:
        """Returns an object whose `hidden` is [B, T, D]."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]."""


@dataclass
class Row:
    """One sequence to run and the places where a token of a request (by number) is scored."""

    ids: Ids
    marks: list[tuple[int, int, int]] = field(default_factory=list)  # place, request, token

    def mark(self, first: int, request: int, tokens: Ids) -> None:
        self.marks += [(first + step, request, token) for step, token in enumerate(tokens)]


@dataclass
class Family:
    """A context, run once, and what continues it: no branch when one sequence holds everything."""

    trunk: Row
    branches: list[Row]

    @property
    def longest(self) -> int:
        return max((len(row.ids) for row in self.branches), default=0)

    def tokens(self) -> int:
        return len(self.trunk.ids) + sum(len(row.ids) for row in self.branches)


class Cost(NamedTuple):
    """Tokens fed to the model: with contexts shared, and were each request run alone."""

    shared: int
    alone: int


def families(pairs: Sequence[Pair], share: bool) -> list[Family]:
    """Requests by context. Equal ones are computed once; with `share`, options of several tokens
    continue their context, and without it each has a sequence of its own."""
    of_context: dict[Ids, dict[Ids, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, (context, continuation) in enumerate(pairs):
        of_context[context][continuation].append(number)
    found = []
    for context, options in of_context.items():
        # What is fed after the context: all of an option but its last token.
        fed: dict[Ids, list[Ids]] = defaultdict(list)
        for option in options:
            fed[option[:-1]].append(option)
        if share and len(fed.keys() - {()}) > 1:
            trunk, branches = Row(context), {ids: Row(ids) for ids in fed if ids}
            for option, numbers in options.items():
                for number in numbers:
                    trunk.mark(len(context) - 1, number, option[:1])
                    if option[1:]:
                        branches[option[:-1]].mark(0, number, option[1:])
            found.append(Family(trunk, list(branches.values())))
            continue
        one_token = fed.pop((), [])
        for place, (ids, of_row) in enumerate(list(fed.items()) or [((), [])]):
            row = Row(context + ids)
            for option in of_row + (one_token if place == 0 else []):
                for number in options[option]:
                    row.mark(len(context) - 1, number, option)
            found.append(Family(row, []))
    return found


def shortened(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Pair:
    """The pair without what does not fit in `max_length` inputs. Raises UserError when the
    continuation does not."""
    assert len(context) and len(continuation), "both hold at least one token"
    if len(continuation) > max_length:
        raise UserError(
            f"a continuation of {len(continuation)} tokens does not fit in "
            f"max_length = {max_length}; raise max_length"
        )
    room = max_length + 1 - len(continuation)
    return tuple(context[-room:]), tuple(continuation)


def cost(pairs: Sequence[Pair]) -> Cost:
    """Counts tokens of `pairs` (cut to length before) as they would be run; padding not counted."""
    shared = sum(family.tokens() for family in families(pairs, share=True))
    return Cost(shared, sum(len(context) + len(option) - 1 for context, option in pairs))


class Scorer:
    """Scores pairs with one model.

    Sequences longer than `max_length` inputs lose their left end. A batch holds at most
    `batch_size` sequences and `batch_tokens` padded tokens. Models that can branch share contexts,
    unless `share` says otherwise.
    """

    def __init__(
        self,
        model: Forward,
        *,
        max_length: int,
        batch_size: int = 64,
        batch_tokens: int = 65_536,
        device: str | torch.device = "cpu",
        autocast: torch.dtype | None = None,
        share: bool | None = None,
        progress: bool = False,
    ):
        self.model = model
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.device = torch.device(device)
        self.autocast = autocast
        self.share = hasattr(model, "new_cache") if share is None else share
        self.progress = progress
        self.cut = 0  # requests that lost their left end, so far
        self.fed: Counter[str] = Counter()  # tokens run so far: "real", "padded"

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """(log-probability in nats, greedy decoding would give it) of each continuation.

        Raises UserError for NaN, which would count as the likeliest option.
        """
        cut = [shortened(*pair, self.max_length) for pair in pairs]
        self.cut += sum(len(a[0]) < len(b[0]) for a, b in zip(cut, pairs, strict=True))
        found = families(cut, self.share)
        nats, greedy = [0.0] * len(pairs), [True] * len(pairs)
        total = sum(family.tokens() for family in found)
        bar = tqdm(total=total, desc="tokens", unit="", unit_scale=True, disable=not self.progress)
        for batch in self._batches(found):
            for request, value, equal in self._run(batch):
                nats[request] += value
                greedy[request] &= equal
            bar.update(sum(family.tokens() for family in batch))
        bar.close()
        if any(map(math.isnan, nats)):
            raise UserError("the model's log-probabilities are NaN: its weights are; train it anew")
        return list(zip(nats, greedy, strict=True))

    def _batches(self, found: list[Family]) -> Iterator[list[Family]]:
        """Longest first: a batch that does not fit in memory fails at once, not at the end.
        Contexts that are continued have one length in a batch, since a cache has one position."""
        plain = sorted(
            (f for f in found if not f.branches), key=lambda f: (-len(f.trunk.ids), f.trunk.ids)
        )
        branched = sorted(
            (f for f in found if f.branches),
            key=lambda f: (-len(f.trunk.ids), -f.longest, f.trunk.ids),
        )
        start = 0
        while start < len(plain):
            rows = self.batch_tokens // len(plain[start].trunk.ids)
            rows = min(self.batch_size, max(1, rows))
            yield plain[start : start + rows]
            start += rows
        batch: list[Family] = []
        for family in branched:
            if batch and not self._fits(batch, family):
                yield batch
                batch = []
            batch.append(family)
        if batch:
            yield batch

    def _fits(self, batch: list[Family], family: Family) -> bool:
        length = len(batch[0].trunk.ids)
        rows = sum(len(member.branches) for member in [*batch, family])
        room = length + batch[0].longest  # the longest come first
        fits = rows <= self.batch_size and rows * room <= self.batch_tokens
        return fits and len(family.trunk.ids) == length

    def _run(self, batch: list[Family]) -> Iterator[tuple[int, float, bool]]:
        """(request, nats, greedy) of every scored token of the batch."""
        trunks, branches = (
            [family.trunk for family in batch],
            [row for family in batch for row in family.branches],
        )
        if not branches:
            yield from self._marks(self.hidden(self._ids(trunks)), trunks)
            return
        longest = max(len(row.ids) for row in branches)
        cache = self.model.new_cache(len(trunks), len(trunks[0].ids) + longest)
        yield from self._marks(self.hidden(self._ids(trunks), cache), trunks)
        parent = [place for place, family in enumerate(batch) for _ in family.branches]
        cache = cache.branch(torch.tensor(parent, device=self.device))
        yield from self._marks(self.hidden(self._ids(branches), cache), branches)

    def _ids(self, rows: list[Row]) -> Tensor:
        longest = max(len(row.ids) for row in rows)
        self.fed["real"] += sum(len(row.ids) for row in rows)
        self.fed["padded"] += longest * len(rows)
        ids_BT = torch.tensor([[*row.ids, *[0] * (longest - len(row.ids))] for row in rows])
        return ids_BT.to(self.device)

    def _marks(self, hidden_BTD: Tensor, rows: list[Row]) -> Iterator[tuple[int, float, bool]]:
        """Each scored position goes through the output layer once, however many tokens of it are
        asked for."""
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for place_B, row in enumerate(rows):
            for place, request, token in row.marks:
                wanted[place_B, place].append((request, token))
        places = list(wanted)
        row_N, place_N = (
            torch.tensor(part, device=self.device) for part in zip(*places, strict=True)
        )
        for start in range(0, len(places), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            logits_NV = self.logits(hidden_BTD[row_N[part], place_N[part]])
            asked = [(n, *each) for n, where in enumerate(places[part]) for each in wanted[where]]
            slot, token = (
                torch.tensor([entry[i] for entry in asked], device=self.device) for i in (0, 2)
            )
            logprob_N = logits_NV[slot, token] - logits_NV.logsumexp(-1)[slot]
            equal_N = logits_NV.argmax(-1)[slot] == token
            values = zip(asked, logprob_N.tolist(), equal_N.tolist(), strict=True)
            yield from ((request, value, equal) for (_, request, _), value, equal in values)

    def hidden(self, ids_BT: Tensor, *cache: Any) -> Tensor:
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model(ids_BT, *cache).hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model.logits(hidden_ND).float()
