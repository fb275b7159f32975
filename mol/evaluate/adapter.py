"""A language model of this suite as lm-eval's `LM`, scored in length-sorted batches.

Shapes: B sequences of a batch, T their padded length, D model width, V vocabulary,
N scored positions of a batch. Padding stands on the right, where a causal model cannot see it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from mol.base import UserError

LOGIT_ROWS = 512  # rows of [N, V] logits alive at once: 100 MB in fp32 for GPT-2's vocabulary


class Forward(Protocol):
    """What the adapter needs of a model, besides being callable."""

    def __call__(self, ids_BT: Tensor) -> Any:
        """Returns an object whose `hidden` is [B, T, D]."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V]."""


class _Query(NamedTuple):
    """One request: score `targets` at the last positions of its input sequence."""

    index: int
    targets: tuple[int, ...]


class HarnessModel(TemplateLM):
    """Log-likelihoods and greedy text from any causal model with the `Forward` interface.

    `prefix_token` conditions the first token of a text without context (lm-eval's Hugging Face
    adapter uses the end-of-text token too). Sequences longer than `max_length` inputs lose their
    left end. A batch holds at most `batch_size` sequences and `batch_tokens` padded tokens.
    Requests whose inputs are equal, as one-token options of one question are, share one forward.
    """

    def __init__(
        self,
        model: Forward,
        tokenizer: Tokenizer,
        *,
        prefix_token: int,
        max_length: int,
        batch_size: int = 64,
        batch_tokens: int = 65_536,
        device: str | torch.device = "cpu",
        autocast: torch.dtype | None = None,
        progress: bool = False,
    ):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self.batch_tokens = batch_tokens
        self.progress = progress
        self.cut = 0  # requests that lost their left end, so far
        self._prefix_token = prefix_token
        self._device = torch.device(device)
        self._autocast = autocast
        self._encoded: dict[str, list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        return self._prefix_token

    @property
    def tokenizer_name(self) -> str:
        return "tokenizer.json"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        known = self._encoded.get(string)
        return known if known is not None else self._encode([string])[0]

    def _encode(self, strings: Sequence[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch(strings, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, greedy decoding would give it) of each continuation.

        How a pair is cut into tokens is lm-eval's own code; here its strings are only encoded
        beforehand, each once and in one batch.
        """
        texts: dict[str, None] = {}
        for context, continuation in (request.args for request in requests):
            texts[context + continuation] = None
            texts[context.rstrip()] = None
        self._encoded = dict(zip(texts, self._encode(list(texts)), strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._encoded = {}

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability in nats of whole texts, every token scored once, in windows of
        `max_length` whose first token of context is the one before (or the prefix token)."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            cuts = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, cuts):
                windows.append((("", ""), context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for owner, (nats, _) in zip(owners, scores, strict=True):
            totals[owner] += nats
        return totals

    @torch.inference_mode()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuation up to a stop string, the end-of-text token or `max_gen_toks`.

        Runs the whole sequence again for every token: none of the paper's tasks generates.
        Raises UserError when a task asks for sampling.
        """
        texts = []
        for context, options in (request.args for request in requests):
            options = normalize_gen_kwargs(options, default_max_gen_toks=256)
            if options.get("do_sample"):
                raise UserError("generate_until: only greedy decoding; set do_sample to false")
            budget = options["max_gen_toks"]
            if budget >= self.max_length:
                raise UserError(
                    f"generate_until: max_gen_toks = {budget} leaves no room for the prompt "
                    f"in max_length = {self.max_length}"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            texts.append(self._greedy(ids[-(self.max_length - budget) :], budget, options["until"]))
        return texts

    def _greedy(self, ids: list[int], budget: int, until: list[str]) -> str:
        prompt, text = len(ids), ""
        while len(ids) - prompt < budget:
            hidden_BTD = self._hidden(torch.tensor([ids], device=self._device))
            token = int(self._logits(hidden_BTD[:, -1]).argmax())
            if token == self.eot_token_id:
                break
            ids = [*ids, token]
            text = self.tokenizer.decode(ids[prompt:], skip_special_tokens=False)
            if any(stop and stop in text for stop in until):
                break
        return postprocess_generated_text(text, until, think_end_token=None)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[_Query]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            assert context and continuation, "a context and a continuation hold at least one token"
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit in "
                    f"max_length = {self.max_length}; raise max_length"
                )
            tokens = (*context, *continuation)
            self.cut += len(tokens) > self.max_length + 1
            tokens = tokens[-(self.max_length + 1) :]
            groups.setdefault(tokens[:-1], []).append(_Query(index, tuple(continuation)))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(groups), desc="sequences", disable=not self.progress)
        for batch in self._batches(groups):
            for index, result in self._score(batch):
                results[index] = result
            bar.update(len(batch))
        bar.close()
        return results

    def _batches(
        self, groups: dict[tuple[int, ...], list[_Query]]
    ) -> Iterator[list[tuple[tuple[int, ...], list[_Query]]]]:
        """Longest first: a batch that does not fit in memory fails at once, not at the end."""
        ordered = sorted(groups.items(), key=lambda group: (-len(group[0]), group[0]))
        start = 0
        while start < len(ordered):
            rows = min(self.batch_size, max(1, self.batch_tokens // len(ordered[start][0])))
            yield ordered[start : start + rows]
            start += rows

    def _score(
        self, batch: list[tuple[tuple[int, ...], list[_Query]]]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        longest = len(batch[0][0])
        ids_BT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in batch])
        hidden_BTD = self._hidden(ids_BT.to(self._device))
        rows: list[int] = []  # scored positions, in order: batch row and place in it
        places: list[int] = []
        wanted: list[list[tuple[int, int]]] = []  # (query number, token) scored at each position
        queries: list[_Query] = []
        for row, (ids, members) in enumerate(batch):
            span = max(len(query.targets) for query in members)
            first = len(wanted)
            rows += [row] * span
            places += range(len(ids) - span, len(ids))
            wanted += [[] for _ in range(span)]
            for query in members:
                offset = first + span - len(query.targets)
                for step, token in enumerate(query.targets):
                    wanted[offset + step].append((len(queries), token))
                queries.append(query)
        hidden_ND = hidden_BTD[torch.tensor(rows), torch.tensor(places)]
        nats, greedy = [0.0] * len(queries), [True] * len(queries)
        for start in range(0, len(rows), LOGIT_ROWS):
            logits_NV = self._logits(hidden_ND[start : start + LOGIT_ROWS])
            part = wanted[start : start + LOGIT_ROWS]
            owner = [number for slot in part for number, _ in slot]
            slot = torch.tensor([i for i, found in enumerate(part) for _ in found])
            token = torch.tensor([token for found in part for _, token in found])
            slot, token = slot.to(self._device), token.to(self._device)
            logprob_N = logits_NV[slot, token] - logits_NV.logsumexp(-1)[slot]
            equal_N = logits_NV.argmax(-1)[slot] == token
            for number, value, equal in zip(
                owner, logprob_N.tolist(), equal_N.tolist(), strict=True
            ):
                nats[number] += value
                greedy[number] &= equal
        for query, value, equal in zip(queries, nats, greedy, strict=True):
            yield query.index, (value, equal)

    def _hidden(self, ids_BT: Tensor) -> Tensor:
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            return self.model(ids_BT).hidden

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            return self.model.logits(hidden_ND).float()
