"""A language model of this suite as lm-eval's `LM`: the harness's requests, the suite's scoring."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from mol.base import UserError
from mol.evaluate.scoring import Score, Scorer


def cuts_lines(tokenizer: Tokenizer) -> bool:
    """Whether it encodes a text as it encodes the text's `line_pieces`: byte-level BPE does, whose
    words may begin with white space but never hold or end with any."""
    whole = json.loads(tokenizer.to_str())
    words = whole["pre_tokenizer"] or {}
    plain = (
        words.get("type") == "ByteLevel" and words["use_regex"] and not words["add_prefix_space"]
    )
    return plain and whole["normalizer"] is None


def line_pieces(text: str) -> list[str]:
    """The text cut before each newline that follows something else than white space."""
    pieces = [""]
    for place, line in enumerate(text.split("\n")):
        if place and pieces[-1][-1:].strip():
            pieces.append("\n" + line)
        else:
            pieces[-1] += "\n" * bool(place) + line
    return pieces


class Scores(Protocol):
    """What answers pairs of token ids: a `Scorer`, or a file of scores computed elsewhere."""

    max_length: int
    cut: int

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """(nats, greedy) of each (context, continuation)."""


class HarnessModel(TemplateLM):
    """Log-likelihoods and greedy text for the harness.

    `prefix_token` conditions the first token of a text without context (lm-eval's Hugging Face
    adapter uses the end-of-text token too).
    """

    def __init__(self, scorer: Scores, tokenizer: Tokenizer, *, prefix_token: int):
        super().__init__()
        self.scorer = scorer
        self.tokenizer = tokenizer
        self._prefix_token = prefix_token
        self._cuts_lines = cuts_lines(tokenizer)
        self._encoded: dict[str, list[int]] = {}  # pieces of the requests at hand

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def eot_token_id(self) -> int:
        return self._prefix_token

    @property
    def tokenizer_name(self) -> str:
        return "tokenizer.json"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        pieces = self._pieces(string)
        self._learn(pieces)
        return [token for piece in pieces for token in self._encoded[piece]]

    def _pieces(self, string: str) -> list[str]:
        return line_pieces(string) if self._cuts_lines else [string]

    def _learn(self, pieces: Iterable[str]) -> None:
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._encoded]
        if new:
            encodings = self.tokenizer.encode_batch(new, add_special_tokens=False)
            self._encoded |= zip(new, (encoding.ids for encoding in encodings), strict=True)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability in nats, greedy decoding would give it) of each continuation.

        How a pair is cut into tokens is lm-eval's own code; here the lines of its strings are only
        encoded beforehand, each once and in one batch: the examples of a 5-shot prompt recur.
        """
        pieces: dict[str, None] = {}
        for context, continuation in (request.args for request in requests):
            for text in (context + continuation, context.rstrip()):
                pieces.update(dict.fromkeys(self._pieces(text)))
        self._learn(pieces)
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
            for window in map(make_disjoint_window, cuts):
                windows.append(window)
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.scorer.score(windows), strict=True):
            totals[owner] += nats
        return totals

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        return self.scorer.score([(context, option) for _, context, option in requests])

    @torch.inference_mode()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuation up to a stop string, the end-of-text token or `max_gen_toks`.

        Runs the whole sequence again for every token: none of the paper's tasks generates.
        Raises UserError when a task asks for sampling or beams.
        """
        texts = []
        for context, options in (request.args for request in requests):
            options = normalize_gen_kwargs(options, default_max_gen_toks=256)
            if options.get("do_sample") or options.get("num_beams", 1) != 1:
                raise UserError("generate_until: only greedy decoding; no do_sample, num_beams 1")
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
        if not isinstance(self.scorer, Scorer):
            raise UserError("generate_until: a file of scores cannot generate text")
        prompt, text = len(ids), ""
        while len(ids) - prompt < budget:
            hidden_BTD = self.scorer.hidden(torch.tensor([ids], device=self.scorer.device))
            token = int(self.scorer.logits(hidden_BTD[:, -1]).argmax())
            if token == self.eot_token_id:
                break
            ids = [*ids, token]
            text = self.tokenizer.decode(ids[prompt:], skip_special_tokens=False)
            if any(stop and stop in text for stop in until):
                break
        return postprocess_generated_text(text, until, think_end_token=None)
