"""Batches: exact resume, every token scored once, damaged or foreign folders refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mol.base import UserError
from mol.data.config import DataSpec, FileSource
from mol.data.loader import TokenBatches, eval_sequences
from mol.data.packing import prepare

PADDED = {"kind": "padded", "chunk": 16, "min_chunk": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("loader")
    rows = [json.dumps({"text": f"paragraph {i} " + "river stone " * (i % 17)}) for i in range(200)]
    (root / "text.jsonl").write_text("\n".join(rows))
    made = {}
    for name, layout in (("packed", {"kind": "packed"}), ("padded", PADDED)):
        spec = DataSpec(
            corpus="fineweb_edu",
            source=FileSource(train=str(root / "text.jsonl")),
            tokenizer="bpe",
            vocab_size=290,
            layout=layout,
            max_train_tokens=1_000,
        )
        made[name] = root / name
        prepare(spec, made[name])
    return made


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(["packed", "padded"]),
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 90),
    before=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_resume_continues_the_same_stream(folders, layout, seed, batch, before, shuffle):
    """Batches of up to 90 of about 66 sequences: several epochs, some within one batch."""

    def stream():
        return TokenBatches(folders[layout], "train", 15, batch, seed, shuffle)

    whole = stream()
    for _ in range(before):
        whole.next()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = stream()
    resumed.load_state_dict(state)
    for _ in range(4):
        assert same(whole.next(), resumed.next())
        assert whole.epochs == resumed.epochs


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_an_epoch_takes_each_sequence_once_in_a_new_order(folders, layout, batch):
    batches = TokenBatches(folders[layout], "train", 15, batch, seed=3)
    need = 2 * batches.n
    rows = [row for _ in range(-(-need // batch)) for row in batches.next()[0].tolist()]
    first, second = rows[: batches.n], rows[batches.n : need]
    plain = TokenBatches(folders[layout], "train", 15, batches.n, seed=3, shuffle=False)
    in_order = plain.next()[0].tolist()
    assert plain.epochs == 1.0
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert first != in_order and first != second


def test_other_seeds_give_other_orders(folders):
    one, two = (TokenBatches(folders["packed"], "train", 15, 40, seed=s) for s in (1, 2))
    assert not same(one.next(), two.next())


def test_batches_are_shifted_by_one_and_mark_pad(folders):
    inputs, targets, real = TokenBatches(folders["padded"], "train", 15, 50, 0).next()
    assert inputs.shape == targets.shape == real.shape == (50, 15)
    assert inputs.dtype == targets.dtype == torch.int64 and real.dtype == torch.bool
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(real, targets != 0)
    assert 0 < real.sum() < real.numel()
    assert real[:, :7].all()  # min_chunk = 8 real tokens, 7 of them targets


@pytest.mark.parametrize("seq_len", [1, 7, 15, 64, 5_000])
def test_packed_evaluation_scores_every_token_once(folders, seq_len):
    ids = np.fromfile(folders["packed"] / "train.bin", dtype="<u2").astype(np.int64)
    inputs, targets = [], []
    for x_T, y_T, real_T in eval_sequences(folders["packed"], "train", seq_len, None):
        assert x_T.shape == y_T.shape == real_T.shape == (seq_len,)
        inputs += x_T[real_T].tolist()
        targets += y_T[real_T].tolist()
    assert targets == ids[1:].tolist()
    assert inputs == ids[:-1].tolist()


def test_padded_evaluation_gives_the_rows_in_order(folders):
    rows = np.fromfile(folders["padded"] / "train.bin", dtype="<u2").reshape(-1, 16)
    got = [*eval_sequences(folders["padded"], "train", 15, None)]
    assert len(got) == len(rows)
    for (x_T, y_T, real_T), row in zip(got, rows.astype(np.int64), strict=True):
        assert x_T.tolist() == row[:-1].tolist() and y_T.tolist() == row[1:].tolist()
        assert real_T.tolist() == (row[1:] != 0).tolist()


def test_limit_takes_the_first_sequences(folders):
    every = [*eval_sequences(folders["packed"], "validation", 7, None)]
    some = [*eval_sequences(folders["packed"], "validation", 7, 2)]
    assert len(every) > 2 == len(some)
    assert all(same(a, b) for a, b in zip(every, some, strict=False))


def test_wrong_lengths_and_sizes_are_refused(folders):
    with pytest.raises(UserError, match="give seq_len 15, got 14"):
        TokenBatches(folders["padded"], "train", 14, 1, 0)
    with pytest.raises(UserError, match="do not fill one sequence of seq_len = 2000"):
        TokenBatches(folders["packed"], "train", 2000, 1, 0)
    with pytest.raises(UserError, match="batch_size = 0"):
        TokenBatches(folders["packed"], "train", 15, 0, 0)
    with pytest.raises(UserError, match="seq_len = 0"):
        TokenBatches(folders["packed"], "train", 0, 1, 0)
    with pytest.raises(UserError, match="limit = 0"):
        next(eval_sequences(folders["packed"], "test", 15, 0))


def test_state_of_another_stream_is_refused(folders):
    state = TokenBatches(folders["packed"], "train", 15, 4, seed=1).state_dict()
    with pytest.raises(UserError, match="seed was 1, now 2"):
        TokenBatches(folders["packed"], "train", 15, 4, seed=2).load_state_dict(state)
    with pytest.raises(UserError, match="shard_sha256"):
        TokenBatches(folders["padded"], "train", 15, 4, seed=1).load_state_dict(state)


@pytest.fixture
def damaged(make_spec, tmp_path):
    folder = tmp_path / "corpus"
    prepare(make_spec(), folder)
    return folder


def test_a_shard_of_another_size_is_refused(damaged):
    path = damaged / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train\.bin: [\d,]+ bytes where meta\.json says"):
        TokenBatches(damaged, "train", 15, 1, 0)


def test_a_changed_shard_is_refused_even_after_it_was_read(damaged):
    TokenBatches(damaged, "train", 15, 1, 0)
    path = damaged / "train.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train\.bin: its SHA-256 is not the one"):
        TokenBatches(damaged, "train", 15, 1, 0)
    TokenBatches(damaged, "validation", 15, 1, 0)


def test_another_tokenizer_is_refused(damaged):
    with pytest.raises(UserError, match="the model was trained with abababababab"):
        TokenBatches(damaged, "train", 15, 1, 0, tokenizer_sha256="ab" * 32)
    with pytest.raises(UserError, match="trained with"):
        next(eval_sequences(damaged, "test", 15, None, tokenizer_sha256="ab" * 32))
    path = damaged / "tokenizer.json"
    path.write_text(path.read_text().replace("<eos>", "<EOS>"))
    with pytest.raises(UserError, match=r"tokenizer\.json: its SHA-256"):
        TokenBatches(damaged, "train", 15, 1, 0)


def test_a_folder_without_or_with_broken_meta_is_one_clear_line(damaged, tmp_path):
    with pytest.raises(UserError, match=r"meta\.json: missing; prepare the corpus"):
        TokenBatches(tmp_path / "nowhere", "train", 15, 1, 0)
    (damaged / "meta.json").write_text('{"spec": 1')
    with pytest.raises(UserError, match=r"meta\.json: .*delete the folder") as error:
        TokenBatches(damaged, "train", 15, 1, 0)
    assert "\n" not in str(error.value)
