"""`MoLForCausalLM` against the suite's own model, and generation against a full forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_runs import FAMILIES, drawn
from transformers import DynamicCache

from mol import MoLConfig, MoLForCausalLM
from mol.export.cache import ROOM

HYBRID = "split-rms-top-routed-linear-shared-deltanet"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # fp32, sums in another order


def made(family: str) -> MoLForCausalLM:
    """A transformers model with the weights of `drawn`. It has no end-of-text, so that every
    generation has the length asked for."""
    config = MoLConfig(**FAMILIES[family].model_dump(mode="json"), pad_token_id=0)
    model = MoLForCausalLM(config).eval()
    model.model.load_state_dict(drawn(FAMILIES[family]).state_dict())
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return made(request.param)


@pytest.fixture(scope="module")
def hybrid():
    return made(HYBRID)


@pytest.fixture
def prompt():
    return torch.randint(2, 300, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def mask():
    """Left padding of 4, 0 and 7 columns."""
    return (torch.arange(9) >= torch.tensor([[4], [0], [7]])).long()


def greedy(model, ids, new=12, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)


@torch.no_grad()
def test_logits_are_those_of_the_suites_model(model, prompt):
    plain = model.model
    assert torch.equal(model(prompt).logits, plain.logits(plain(prompt).hidden))


def test_generation_equals_a_full_forward_token_by_token(model, prompt):
    new = ROOM  # past the first size of the cache
    options = {"return_dict_in_generate": True, "output_logits": True}
    found = greedy(model, prompt, new, **options)
    text = found.sequences
    with torch.no_grad():
        logits = model(text, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    assert torch.equal(logits.argmax(-1), text[:, prompt.shape[1] :])
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, **CLOSE)
    again = greedy(model, prompt, use_cache=False)
    assert torch.equal(again, text[:, : again.shape[1]])


def test_a_padded_row_is_computed_as_if_alone(model, prompt, mask):
    padded = prompt * mask
    together = greedy(model, padded, attention_mask=mask)
    assert torch.equal(greedy(model, padded, attention_mask=mask, use_cache=False), together)
    with torch.no_grad():
        cached = model(padded, attention_mask=mask, use_cache=True, output_hidden_states=True)
        plain = model(padded, attention_mask=mask, use_cache=False, output_hidden_states=True)
        right = model(prompt, attention_mask=mask.flip(1), use_cache=False)
    for row, real in enumerate(mask.bool()):
        alone = prompt[row : row + 1, real]
        assert torch.equal(greedy(model, alone)[0, -12:], together[row, -12:])
        with torch.no_grad():
            expected = model(alone, use_cache=False, output_hidden_states=True)
            front = model(prompt[row : row + 1, real.flip(0)], use_cache=False)
        for padded_output in (cached, plain):
            torch.testing.assert_close(padded_output.logits[row, real], expected.logits[0], **CLOSE)
            for state, wanted in zip(
                padded_output.hidden_states, expected.hidden_states, strict=True
            ):
                torch.testing.assert_close(state[row, real], wanted[0], **CLOSE)
        torch.testing.assert_close(right.logits[row, real.flip(0)], front.logits[0], **CLOSE)


def test_beams_follow_their_parents_through_the_cache(model, prompt, mask):
    for options in ({}, {"attention_mask": mask}):
        beams = greedy(model, prompt, num_beams=4, num_return_sequences=2, **options)
        assert torch.equal(
            greedy(model, prompt, num_beams=4, num_return_sequences=2, use_cache=False, **options),
            beams,
        )


def test_a_reordered_cache_continues_the_chosen_rows(model, prompt, mask):
    rows = torch.tensor([2, 2, 0])
    token = torch.tensor([[5], [6], [7]])
    for attention_mask in (None, mask):
        with torch.no_grad():
            cache = model(prompt, attention_mask=attention_mask, use_cache=True).cache
            cache.reorder_cache(rows)
            found = model(token, cache=cache).logits[:, 0]
            whole = torch.cat([prompt[rows], token], 1)
            longer = None
            if attention_mask is not None:
                longer = F.pad(attention_mask[rows], (0, 1), value=1)
            wanted = model(whole, attention_mask=longer, use_cache=False).logits[:, -1]
        torch.testing.assert_close(found, wanted, **CLOSE)


@torch.no_grad()
def test_more_tokens_continue_a_cache(model, prompt, mask):
    for attention_mask in (None, mask):
        first = None if attention_mask is None else attention_mask[:, :6]
        if first is not None:
            first = first.clone()
            first[2, -1] = 1  # one token of the row whose text begins later
            attention_mask = torch.cat([first, torch.ones_like(mask[:, 6:])], 1)
        cache = model(prompt[:, :6], attention_mask=first, use_cache=True).cache
        saved = copy.deepcopy(cache)
        found = model(prompt[:, 6:], cache=cache, output_hidden_states=True)
        wanted = model(prompt, attention_mask=attention_mask, use_cache=False,
                       output_hidden_states=True)  # fmt: skip
        torch.testing.assert_close(found.logits, wanted.logits[:, 6:], **CLOSE)
        for state, expected in zip(found.hidden_states, wanted.hidden_states, strict=True):
            torch.testing.assert_close(state, expected[:, 6:], **CLOSE)
        assert found.cache.get_seq_length() == 9 and saved.get_seq_length() == 6
        again = model(prompt[:, 6:], cache=saved, logits_to_keep=1).logits
        torch.testing.assert_close(again[:, 0], found.logits[:, -1], **CLOSE)


def test_a_conversation_goes_on_from_its_cache(hybrid, prompt):
    first = greedy(hybrid, prompt, return_dict_in_generate=True)
    text = torch.cat([first.sequences, prompt], 1)
    continued = greedy(hybrid, text, cache=first.cache)
    assert torch.equal(continued, greedy(hybrid, text))


def test_a_long_prompt_is_read_in_chunks(hybrid, prompt):
    assert torch.equal(greedy(hybrid, prompt, prefill_chunk_size=4), greedy(hybrid, prompt))


def test_sampling_draws_alike_with_and_without_a_cache(hybrid, prompt):
    def draw(**options):
        torch.manual_seed(5)
        return hybrid.generate(prompt, do_sample=True, top_k=20, max_new_tokens=20, **options)

    assert torch.equal(draw(), draw(use_cache=False))


def test_loss_is_the_shifted_cross_entropy_and_reaches_every_weight(model, prompt):
    labels = prompt.clone()
    labels[0, :4] = -100
    model.zero_grad()
    output = model(prompt, labels=labels)
    assert output.cache is None  # gradients are recorded
    targets = labels[:, 1:]
    kept = targets != -100
    wanted = F.cross_entropy(output.logits[:, :-1][kept], targets[kept])
    torch.testing.assert_close(output.loss, wanted)
    output.loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    # A router that weighs all of its one choice equally has no gradient; the others have.
    silent = [n for n, w in model.named_parameters() if not w.grad.any()]
    assert not silent


def test_loss_is_that_of_the_rows_alone_on_whichever_side_they_are_padded(hybrid, prompt, mask):
    """The first token of a row has no column before it, be that padding or none."""
    rows = [row[own.bool()][None] for row, own in zip(prompt, mask, strict=True)]
    with torch.no_grad():
        wanted = sum(hybrid(row, labels=row).loss * (row.shape[1] - 1) for row in rows)
        wanted /= sum(row.shape[1] - 1 for row in rows)
    right = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], True)
    for ids, own in ((prompt, mask), (right, mask.flip(1))):
        labels = ids.masked_fill(own == 0, -100)
        for recorded, cached in ((True, False), (False, False), (False, True)):
            with torch.set_grad_enabled(recorded):
                loss = hybrid(ids, attention_mask=own, labels=labels, use_cache=cached).loss
            torch.testing.assert_close(loss.detach(), wanted, **CLOSE)


def test_hidden_states_and_logits_to_keep(hybrid, prompt):
    with torch.no_grad():
        output = hybrid(prompt, output_hidden_states=True)
        last = hybrid(prompt, logits_to_keep=2).logits
        chosen = hybrid(prompt, logits_to_keep=torch.tensor([0, 4])).logits
    assert len(output.hidden_states) == hybrid.config.num_hidden_layers + 1
    assert torch.equal(output.hidden_states[0], hybrid.get_input_embeddings()(prompt))
    assert torch.equal(hybrid.model.logits(output.hidden_states[-1]), output.logits)
    assert torch.equal(last, output.logits[:, -2:])
    assert torch.equal(chosen, output.logits[:, [0, 4]])
    plain = hybrid(prompt, return_dict=False)
    assert isinstance(plain, tuple) and torch.equal(plain[0], output.logits)


def test_what_the_model_cannot_do_is_refused(hybrid, prompt, mask):
    holes = torch.ones(3, 9, dtype=torch.long)
    holes[1, 4] = 0
    cache = hybrid(prompt, use_cache=True).cache
    empty = mask.clone()
    empty[2] = 0
    for message, call in {
        "input_ids": lambda: hybrid(prompt[0]),
        "inputs_embeds": lambda: hybrid(prompt, inputs_embeds=torch.zeros(1, 2, 4)),
        "position_ids": lambda: hybrid(prompt, position_ids=torch.arange(9)[None]),
        "output_attentions": lambda: hybrid(prompt, output_attentions=True),
        "zeros between": lambda: hybrid(prompt, attention_mask=holes),
        "no token": lambda: hybrid(prompt, attention_mask=empty),
        "shape": lambda: hybrid(prompt, attention_mask=torch.ones(3, 1, 9, 9)),
        "on the left": lambda: greedy(hybrid, prompt, attention_mask=mask.flip(1)),
        "give each row a token": lambda: greedy(hybrid, prompt, attention_mask=mask * mask[:, :1]),
        "DynamicCache": lambda: hybrid(prompt, cache=DynamicCache()),
        "3 rows": lambda: hybrid(prompt[:2], cache=cache),
        "no padding is possible": lambda: hybrid(
            prompt[:, :1], cache=cache, attention_mask=F.pad(torch.ones(3, 9), (0, 1))
        ),
        "no gradients": lambda: hybrid(prompt, cache=cache, labels=prompt),
        "cannot forget": lambda: cache.crop(-1),
        "stateful": lambda: greedy(hybrid, prompt[:1], prompt_lookup_num_tokens=2),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
