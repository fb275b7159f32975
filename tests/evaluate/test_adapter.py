"""The adapter against lm-eval's own Hugging Face adapter on the same weights."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from small_models import SMALL
from tokenizers import ByteLevelBPETokenizer, Tokenizer, normalizers
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutput

from mol.base import UserError
from mol.evaluate.adapter import HarnessModel, cuts_lines, line_pieces
from mol.evaluate.scoring import Scorer, cost
from mol.model.transformer import LanguageModel

EOS = "<|endoftext|>"
MAX_LENGTH = 48
WORDS = (
    "the a river stone mountain walked over under quick brown fox jumps Répète 42 , . ? B C".split()
)


class Gpt2Forward(torch.nn.Module):
    """A transformers GPT-2 behind the suite's forward interface."""

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__()
        self.model = model

    def forward(self, ids_BT):
        return SimpleNamespace(hidden=self.model.transformer(ids_BT).last_hidden_state)

    def logits(self, hidden):
        return self.model.lm_head(hidden)


class BranchingGpt2(Gpt2Forward):
    """The same with transformers' own cache, so that options continue their context."""

    class Cache:
        def __init__(self, held: DynamicCache):
            self.held = held

        def branch(self, parent_B):
            held = copy.deepcopy(self.held)
            held.batch_select_indices(parent_B)
            return type(self)(held)

    def new_cache(self, batch, max_len):
        return self.Cache(DynamicCache(config=self.model.config))

    def forward(self, ids_BT, cache=None):
        held = cache and cache.held
        output = self.model.transformer(ids_BT, cache=held, use_cache=cache is not None)
        return SimpleNamespace(hidden=output.last_hidden_state)


class Wrapped(PreTrainedModel):
    """A model of the suite as the stock adapter takes one."""

    config_class = PretrainedConfig

    def __init__(self, model: LanguageModel):
        super().__init__(PretrainedConfig(vocab_size=model.config.vocab_size))
        self.inner = model

    def tie_weights(self, *args, **kwargs):
        """The suite's model ties its own."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        return CausalLMOutput(logits=self.inner.logits(self.inner(input_ids).hidden))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    bpe = ByteLevelBPETokenizer()
    lines = [" ".join(random.Random(i).choices(WORDS, k=12)) for i in range(200)]
    bpe.train_from_iterator(lines, vocab_size=330, special_tokens=[EOS], show_progress=False)
    return Tokenizer.from_str(bpe.to_str())


@pytest.fixture(scope="module")
def gpt2(tokenizer) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    config = GPT2Config(
        vocab_size=size, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    return GPT2LMHeadModel(config).eval()


def ours(
    gpt2, tokenizer, batch_size=8, max_length=MAX_LENGTH, kind=Gpt2Forward, **options
) -> HarnessModel:
    scorer = Scorer(kind(gpt2), max_length=max_length, batch_size=batch_size, **options)
    return HarnessModel(scorer, tokenizer, prefix_token=tokenizer.token_to_id(EOS))


def stock_adapter(model: PreTrainedModel, tokenizer: Tokenizer) -> HFLM:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
    return HFLM(
        pretrained=model, tokenizer=fast, backend="causal", max_length=MAX_LENGTH, batch_size=4
    )


@pytest.fixture(scope="module")
def stock(gpt2, tokenizer) -> HFLM:
    return stock_adapter(gpt2, tokenizer)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def phrase(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """200 requests: multi-token and one-token options, shared contexts, repeated requests,
    empty contexts, contexts that end in spaces, and prompts several times too long."""
    rng = random.Random(7)
    found = []
    for i in range(25):
        context = phrase(rng, 1, 20)
        found += [(context, " " + phrase(rng, 1, 6)) for _ in range(3)]  # multi-token
        found += [(context, f" {letter}") for letter in "BC"]  # one token
        found.append(("", phrase(rng, 2, 5)))
        found.append((phrase(rng, 80, 120), " " + phrase(rng, 1, 8)))  # truncated
        found.append((context + "  " * (i % 2), phrase(rng, 1, 3)))
    return found


def agree(got, expected) -> None:
    worst = max(abs(a[0] - b[0]) for a, b in zip(got, expected, strict=True))
    assert worst < 1e-4, worst
    assert [a[1] for a in got] == [bool(b[1]) for b in expected]
    assert len({round(value, 3) for value, _ in got}) > 100  # the scores do differ


@pytest.mark.parametrize("kind", [Gpt2Forward, BranchingGpt2])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_loglikelihood_equals_the_stock_adapter(gpt2, tokenizer, stock, pairs, batch_size, kind):
    lengths = [len(tokenizer.encode(a + b).ids) for a, b in pairs]
    assert len(pairs) == 200 and min(lengths) < 10 and max(lengths) > 2 * MAX_LENGTH
    requests = instances("loglikelihood", pairs)
    expected = stock.loglikelihood(requests, disable_tqdm=True)
    agree(ours(gpt2, tokenizer, batch_size, kind=kind).loglikelihood(requests), expected)


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("kind", ["dense", "sparse", "softmax_1p2of5", "deltanet_1p2of5"])
def test_the_suites_models_branch_and_equal_the_stock_adapter(tokenizer, pairs, kind, batch_size):
    torch.manual_seed(1)
    changes = {"vocab_size": tokenizer.get_vocab_size(), "init_std": 0.3}
    model = LanguageModel(SMALL[kind].model_copy(update=changes)).eval()
    requests = instances("loglikelihood", pairs)
    expected = stock_adapter(Wrapped(model), tokenizer).loglikelihood(requests, disable_tqdm=True)
    got = ours(model, tokenizer, batch_size, kind=lambda held: held)
    assert got.scorer.share
    agree(got.loglikelihood(requests), expected)


@pytest.mark.parametrize("kind", ["dense", "dense_deltanet", "sparse", "deltanet_1p2of5"])
def test_branches_under_autocast(kind):
    """As on a GPU: weights and caches in fp32, products in bf16."""
    torch.manual_seed(1)
    model = LanguageModel(SMALL[kind].model_copy(update={"init_std": 0.2})).eval()
    rng = random.Random(6)
    contexts = [tuple(rng.choices(range(50), k=6)) for _ in range(4)]
    options = [tuple(rng.choices(range(50), k=2 + i)) for i in range(3)]
    pairs = [(context, option) for context in contexts for option in options]
    exact = Scorer(model, max_length=32).score(pairs)
    low = Scorer(model, max_length=32, autocast=torch.bfloat16).score(pairs)
    apart = [abs(a[0] - b[0]) for a, b in zip(exact, low, strict=True)]
    assert 0 < max(apart) < 0.2


def test_shared_contexts_are_computed_once(gpt2, tokenizer):
    """Counted: three options of one context, two of them long; one alone; one-token options."""
    pairs = [((1, 2, 3, 4), option) for option in ((5,), (6, 7), (6, 8, 9, 2))]
    pairs += [((1, 2), (3, 4, 5)), ((9, 8, 7), (1,)), ((9, 8, 7), (2,)), ((9, 8, 7), (2,))]
    assert cost(pairs).alone == 4 + 5 + 7 + 4 + 3 + 3 + 3
    assert cost(pairs).shared == (4 + 1 + 3) + 4 + 3
    scorers = [
        Scorer(BranchingGpt2(gpt2), max_length=MAX_LENGTH, share=share) for share in (True, False)
    ]
    together, alone = (scorer.score(pairs) for scorer in scorers)
    assert scorers[0].fed["real"] == cost(pairs).shared
    assert scorers[1].fed["real"] == (5 + 7) + 4 + 3  # one-token options share in any case
    assert [value for value, _ in together] == pytest.approx([v for v, _ in alone], abs=1e-4)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]


def test_batches_of_branches_keep_to_both_limits(gpt2):
    rng = random.Random(4)
    pairs = [
        (tuple(rng.choices(range(300), k=4 + i // 4)), tuple(rng.choices(range(300), k=2 + i % 5)))
        for i in range(24)
    ]
    pairs = [(context, option) for context, _ in pairs for _, option in rng.sample(pairs, 4)]
    limited = Scorer(BranchingGpt2(gpt2), max_length=32, batch_size=8, batch_tokens=100)
    seen = []
    handle = limited.model.register_forward_pre_hook(
        lambda _, args: seen.append((*args[0].shape, len(args)))
    )
    found = limited.score(pairs)
    handle.remove()
    assert all(rows <= 8 and rows * length <= 100 for rows, length, _ in seen)
    assert any(rows > 4 for rows, *_ in seen), "two contexts share a batch"
    alone = Scorer(Gpt2Forward(gpt2), max_length=32).score(pairs)
    assert [value for value, _ in found] == pytest.approx([v for v, _ in alone], abs=1e-4)


def test_lines_are_encoded_as_the_whole_text_is(gpt2, tokenizer):
    rng = random.Random(9)
    marks = ["\n", " ", "\n\n", "a", "\t", "the", "?", "\u00a0", "é", "\x1d", "42", "\r\n", "'s"]
    texts = ["".join(rng.choices(marks, k=rng.randint(0, 30))) for _ in range(500)]
    model = ours(gpt2, tokenizer)
    assert cuts_lines(tokenizer) and any(len(line_pieces(text)) > 3 for text in texts)
    for text in texts:
        assert "".join(line_pieces(text)) == text
        assert model.tok_encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    changed = Tokenizer.from_str(tokenizer.to_str())
    changed.normalizer = normalizers.Strip()  # sees the ends of a text, so cuts would show
    assert not cuts_lines(changed)
    text = "the fox \n jumps"
    assert ours(gpt2, changed).tok_encode(text) == changed.encode(text).ids


def test_greedy_flag_is_true_for_the_greedy_continuation(gpt2, tokenizer, stock):
    model = ours(gpt2, tokenizer)
    context = "the river stone"
    ids = tokenizer.encode(context).ids
    token = int(gpt2(torch.tensor([ids])).logits[0, -1].argmax())
    best = tokenizer.decode([token])
    request = instances("loglikelihood", [(context, best), (context, " mountain")])
    expected = stock.loglikelihood(request, disable_tqdm=True)
    got = model.loglikelihood(request)
    assert [greedy for _, greedy in got] == [bool(greedy) for _, greedy in expected]


def test_tokens_are_scored_once_by_hand(gpt2, tokenizer):
    context, continuation = "a quick brown", " fox jumps over"
    before = tokenizer.encode(context).ids
    whole = tokenizer.encode(context + continuation).ids
    with torch.no_grad():
        logprob = gpt2(torch.tensor([whole])).logits[0].log_softmax(-1)
    by_hand = sum(
        float(logprob[place - 1, whole[place]]) for place in range(len(before), len(whole))
    )
    (got,) = ours(gpt2, tokenizer).loglikelihood(
        instances("loglikelihood", [(context, continuation)])
    )
    assert got[0] == pytest.approx(by_hand, abs=1e-4)


def test_one_token_options_share_one_forward(gpt2, tokenizer):
    model = ours(gpt2, tokenizer)
    seen = []
    handle = model.scorer.model.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape)
    )
    arguments = [("the fox over a stone", f" {letter}") for letter in "BC"] * 3
    model.loglikelihood(instances("loglikelihood", arguments))
    handle.remove()
    assert [shape[0] for shape in seen] == [1]


def test_continuations_of_different_length_share_their_input(gpt2, tokenizer, stock):
    """Scored as if alone. lm-eval's own adapter is no measure here with its cache of logits: for
    the shorter continuation it takes them from the longer one's first positions."""
    arguments = [
        ("the fox", " over a stone river"),
        ("the fox over a stone", " river"),
        ("the fox over", " a stone mountain"),
    ]
    requests = instances("loglikelihood", arguments)
    together = ours(gpt2, tokenizer).loglikelihood(requests)
    alone = [stock.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert [a for a, _ in together] == pytest.approx([a for a, _ in alone], abs=1e-4)


def test_batches_keep_to_both_limits(gpt2, tokenizer, pairs):
    model = ours(gpt2, tokenizer, batch_size=8, batch_tokens=64)
    seen = []
    handle = model.scorer.model.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape)
    )
    model.loglikelihood(instances("loglikelihood", pairs))
    handle.remove()
    assert all(rows <= 8 and rows * length <= 64 for rows, length in seen)
    assert any(rows == 8 for rows, _ in seen) and any(rows == 1 for rows, _ in seen)


def test_rolling_equals_brute_force_and_the_stock_adapter(gpt2, tokenizer, stock):
    rng = random.Random(3)
    texts = [phrase(rng, 1, 3), phrase(rng, 30, 40), phrase(rng, 150, 200)]
    eos = tokenizer.token_to_id(EOS)
    requests = instances("loglikelihood_rolling", [(text,) for text in texts])
    got = ours(gpt2, tokenizer).loglikelihood_rolling(requests)
    for text, total in zip(texts, got, strict=True):
        ids = [eos, *tokenizer.encode(text).ids]
        by_hand, last = 0.0, len(ids) - 1
        for place in range(1, len(ids)):
            # The window that scores this token ends at a multiple of MAX_LENGTH, or at the end.
            end = min(-(-place // MAX_LENGTH) * MAX_LENGTH, last)
            window = ids[max(0, end - MAX_LENGTH) : end + 1]
            with torch.no_grad():
                logits = gpt2(torch.tensor([window[:-1]])).logits[0]
            row = place - 1 - max(0, end - MAX_LENGTH)
            by_hand += float(logits[row].log_softmax(-1)[ids[place]])
        assert total == pytest.approx(by_hand, abs=1e-3)
    expected = stock.loglikelihood_rolling(requests, disable_tqdm=True)
    assert got == pytest.approx(expected, abs=1e-3)
    assert max(len(tokenizer.encode(text).ids) for text in texts) > 2 * MAX_LENGTH


@pytest.mark.parametrize("until", [[], [" the"]])
def test_generation_is_greedy_and_stops(gpt2, tokenizer, stock, until):
    options = {"until": until, "max_gen_toks": 12, "do_sample": False}
    arguments = [(text, options) for text in ("the river stone", "fox jumps " * 40)]
    requests = instances("generate_until", arguments)
    got = ours(gpt2, tokenizer).generate_until(requests)
    assert got == stock.generate_until(requests, disable_tqdm=True)
    assert any(got)


def test_bad_requests_are_refused_in_one_line(gpt2, tokenizer):
    model = ours(gpt2, tokenizer)
    with pytest.raises(UserError, match="raise max_length"):
        model.loglikelihood(instances("loglikelihood", [("a", " river" * 100)]))
    for other in ({"do_sample": True, "temperature": 1.0}, {"num_beams": 2}):
        with pytest.raises(UserError, match="only greedy"):
            model.generate_until(instances("generate_until", [("a", other | {"max_gen_toks": 4})]))
    with pytest.raises(UserError, match="no room"):
        model.generate_until(instances("generate_until", [("a", {"max_gen_toks": MAX_LENGTH})]))


def test_a_broken_model_scores_nothing(gpt2, tokenizer):
    """NaN is the greatest of all to the harness, so its option would be chosen."""
    broken = copy.deepcopy(gpt2)
    torch.nn.init.constant_(broken.transformer.ln_f.bias, torch.nan)
    with pytest.raises(UserError, match="NaN"):
        ours(broken, tokenizer).loglikelihood(instances("loglikelihood", [("a", " river")]))
