"""Packer, loader and route plan, over whatever texts, sizes, seeds and routes are drawn."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mol.data.config import PackedLayout, PaddedLayout
from mol.data.loader import TokenBatches, eval_sequences
from mol.data.meta import CorpusMeta, SourceInfo, sha256_file
from mol.data.shards import write_shard
from mol.data.tokenizers import EOS, PAD, token_bytes, train_bpe
from mol.ops.dispatch import RoutePlan, reference_rows

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOKENIZER = train_bpe(["a river runs by the old stone mill " * 40, "ünïcödé 文字 🙂"], 280)
TOKENIZER.encode_special_tokens = True
SIZES_V = token_bytes(TOKENIZER)
PAD_ID, EOS_ID = TOKENIZER.token_to_id(PAD), TOKENIZER.token_to_id(EOS)
texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    | st.sampled_from(["<pad>", "<eos>", "river stone " * 9, "\r\n\u2028", "\0"]),
    min_size=1,
    max_size=12,
)


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def write(folder, documents, layout, limit=None):
    path = folder / "train.bin"
    written = write_shard(
        path, "train", documents, TOKENIZER, SIZES_V, layout, (PAD_ID, EOS_ID), limit
    )
    return written, np.fromfile(path, dtype="<u2").tolist()


@QUICK
@given(texts, st.none() | st.integers(2, 200))
def test_a_packed_stream_is_its_documents(tmp_path, documents, limit):
    stream = [token for text in documents for token in [*ids_of(text), EOS_ID]]
    expected = stream if limit is None else stream[:limit]
    assume(len(expected) >= 2)
    meta, found = write(tmp_path, documents, PackedLayout(), limit)
    assert found == expected and PAD_ID not in found
    assert meta.tokens == meta.real_tokens == len(expected) and meta.sequences is None
    if limit is None:
        assert found.count(EOS_ID) == len(documents) == meta.documents
        assert meta.bytes == sum(len(text.encode()) for text in documents)


@QUICK
@given(texts, st.integers(2, 12), st.data())
def test_padded_rows_are_pieces_of_paragraphs(tmp_path, documents, chunk, data):
    least = data.draw(st.integers(2, chunk))
    rows = []
    for line in (line for text in documents for line in text.splitlines() if line.strip()):
        ids = ids_of(line)
        pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
        rows += [p + [PAD_ID] * (chunk - len(p)) for p in pieces if len(p) >= least]
    assume(rows)
    meta, found = write(tmp_path, documents, PaddedLayout(chunk=chunk, min_chunk=least))
    assert np.reshape(found, (-1, chunk)).tolist() == rows
    assert meta.sequences == len(rows)
    assert meta.real_tokens == sum(token != PAD_ID for row in rows for token in row)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A packed corpus of 211 tokens that are all different, so that a token tells its place."""
    folder = tmp_path_factory.mktemp("corpus")
    np.arange(211, dtype="<u2").tofile(folder / "train.bin")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    split = {
        "file": "train.bin", "sha256": sha256_file(folder / "train.bin"), "sequences": None,
        "tokens": 211, "real_tokens": 211, "words": 1, "bytes": 1, "documents": 1,
    }  # fmt: skip
    spec = {
        "corpus": "fineweb_edu", "tokenizer": "bpe", "vocab_size": 280, "layout": PackedLayout(),
    }  # fmt: skip
    meta = CorpusMeta(
        spec=spec,
        source=SourceInfo(name="made up", files={}, sha256="0", license="none", note=""),
        tokenizer_sha256=sha256_file(folder / "tokenizer.json"),
        vocab_size=280,
        pad_id=None,
        eos_id=EOS_ID,
        splits={"train": split},
    )
    (folder / "meta.json").write_text(meta.model_dump_json())
    return folder


@QUICK
@given(
    seq_len=st.integers(1, 210),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    cut=st.integers(0, 7),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
def test_any_cut_of_the_loader_goes_on_with_any_batch_size(
    corpus, seq_len, sizes, cut, seed, shuffle
):
    def stream(batch_size):
        return TokenBatches(corpus, "train", seq_len, batch_size, seed, shuffle)

    whole = stream(sum(sizes)).next()
    served, state = [], None
    for number, size in enumerate(sizes):
        batches = stream(size)
        if state:
            batches.load_state_dict(state)
        served.append(batches.next())
        # What is saved passes through a file; a cut in between may save twice.
        state = json.loads(json.dumps(batches.state_dict()))
        if number == cut:
            again = stream(size)
            again.load_state_dict(state)
            assert again.state_dict() == state
    for joined, parts in zip(whole, zip(*served, strict=True), strict=True):
        assert torch.equal(joined, torch.cat(parts))
    inputs, targets, _ = whole
    assert torch.equal(targets, inputs + 1), "each target is the token after its input"
    n = (211 - 1) // seq_len
    firsts = inputs[:, 0].tolist()
    assert all(first % seq_len == 0 for first in firsts)
    for epoch in range(len(firsts) // n):
        assert sorted(firsts[epoch * n : (epoch + 1) * n]) == [i * seq_len for i in range(n)]


@QUICK
@given(st.integers(1, 210), st.integers(1, 230))
def test_evaluation_takes_each_target_once(corpus, seq_len, limit):
    found = [
        token
        for _, targets, real in eval_sequences(corpus, "train", seq_len, limit)
        for token in targets[real].tolist()
    ]
    assert found == list(range(1, min(210, limit * seq_len) + 1))


@QUICK
@given(st.integers(1, 20), st.data())
def test_a_route_plan_is_the_plain_loops(n_blocks, data):
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 16))
    slots = data.draw(st.integers(1, min(4, n_blocks)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scores = torch.rand(batch, length, n_blocks, generator=generator)
    scores[..., 0] += data.draw(st.sampled_from([0.0, 2.0]))  # a block that everybody takes
    idx_BTk = scores.topk(slots, dim=-1).indices
    plan = RoutePlan.routed(idx_BTk, n_blocks)
    segments = reference_rows(idx_BTk, n_blocks)
    edges = plan.cu_seqlens.tolist()
    assert edges[-1] == batch * length * slots and len(edges) == n_blocks * batch + 1
    for segment, rows in enumerate(segments):
        packed = range(edges[segment], edges[segment + 1])
        assert plan.time_N[list(packed)].tolist() == [t for t, _ in rows]
        assert (plan.order_N[list(packed)] % slots).tolist() == [slot for _, slot in rows]
    x_TD = torch.randn(batch * length, 2, generator=generator, dtype=torch.float64)
    gathered = plan.gather(x_TD)
    torch.testing.assert_close(plan.combine(gathered), slots * x_TD, rtol=1e-12, atol=1e-12)
