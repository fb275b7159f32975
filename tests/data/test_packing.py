"""Tokenizers, the padding rule, packed streams, counts, and nothing half-written."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mol.base import UserError
from mol.data import packing
from mol.data.config import FileSource
from mol.data.detokenize import plain_line
from mol.data.packing import load_meta, prepare
from mol.data.tokenizers import limited, load_tokenizer, token_bytes, train_bpe

PADDED = {"kind": "padded", "chunk": 16, "min_chunk": 8}


def shard(folder, split="train") -> np.ndarray:
    return np.fromfile(folder / f"{split}.bin", dtype="<u2")


def train_texts(folder, spec) -> list[str]:
    """The training documents, as the source gives them."""
    return [*packing.open_text(spec).documents("train")]


def test_packed_stream_is_the_documents_with_eos_between(make_spec, tmp_path):
    spec, out = make_spec(), tmp_path / "corpus"
    meta = prepare(spec, out)
    tokenizer = load_tokenizer(out)
    texts = train_texts(out, spec)
    expected = [i for t in texts for i in [*tokenizer.encode(t).ids, meta.eos_id]]
    assert shard(out).tolist() == expected
    entry = meta.splits["train"]
    assert entry.tokens == entry.real_tokens == len(expected) and entry.sequences is None
    assert entry.documents == len(texts)
    assert entry.words == sum(len(text.split()) for text in texts)
    assert entry.bytes == sum(len(text.encode()) for text in texts)
    assert meta.pad_id is None
    assert load_meta(out) == meta


def test_padded_rows_follow_the_rule(make_spec, tmp_path):
    texts = [f"{i} " + "stone water " * (i % 9) + "\n\n" + f"second {i} é" for i in range(150)]
    spec, out = make_spec(texts, PADDED), tmp_path / "corpus"
    meta = prepare(spec, out)
    tokenizer = load_tokenizer(out)
    rows, words, size = [], 0, 0
    for text in train_texts(out, spec):
        for line in filter(str.strip, text.splitlines()):
            ids = tokenizer.encode(line).ids
            kept = [ids[i : i + 16] for i in range(0, len(ids), 16)]
            kept = [piece for piece in kept if len(piece) >= 8]
            rows += [piece + [meta.pad_id] * (16 - len(piece)) for piece in kept]
            part = tokenizer.decode([i for piece in kept for i in piece])
            words += len(part.split())
            size += len(part.encode())
    assert shard(out).reshape(-1, 16).tolist() == rows
    entry = meta.splits["train"]
    assert (entry.sequences, entry.tokens) == (len(rows), 16 * len(rows))
    assert entry.real_tokens == sum(i != meta.pad_id for row in rows for i in row)
    assert (entry.words, entry.bytes) == (words, size)


@pytest.mark.parametrize("layout", [{"kind": "packed"}, PADDED])
def test_token_limits_cut_the_same_beginning(make_spec, tmp_path, layout):
    spec = make_spec(layout=layout)
    free, cut = tmp_path / "free", tmp_path / "cut"
    texts = train_texts(None, spec)
    prepare(spec, free)
    limit = 1_000 if layout is PADDED else 1_003
    limited_spec = spec.model_copy(update={"max_train_tokens": limit, "max_eval_tokens": 64})
    meta = prepare(limited_spec, cut)
    assert len(shard(cut)) == (limit // 16 * 16 if layout is PADDED else limit)
    assert len(shard(cut, "validation")) == len(shard(cut, "test")) == 64
    entry = meta.splits["train"]
    assert entry.bytes == sum(np.load(cut / "token_bytes.npy")[shard(cut)])
    assert 0 < entry.words < sum(len(text.split()) for text in texts)


def test_text_that_spells_special_tokens_gives_ordinary_ones(make_spec, tmp_path):
    texts = [f"{i} see <pad> and <eos> here, then {i} more words" for i in range(200)]
    meta = prepare(make_spec(texts, PADDED), tmp_path / "padded")
    assert meta.eos_id not in shard(tmp_path / "padded")
    tokenizer = load_tokenizer(tmp_path / "padded")
    ids = tokenizer.encode("<pad> <eos>").ids
    assert not {meta.pad_id, meta.eos_id} & set(ids)
    assert tokenizer.decode(ids) == "<pad> <eos>"


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_of_tokens_add_up_to_the_text(text):
    tokenizer = train_bpe(["the sea, the sea; naïve 漢字 " * 5], 280)
    tokenizer.encode_special_tokens = True
    assert token_bytes(tokenizer)[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_bpe_is_deterministic_and_says_how_far_it_got():
    texts = [f"amber {i} brook {i * i} cedar" for i in range(300)]
    one, two = train_bpe(texts, 400), train_bpe(iter(texts), 400)
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() == 400
    assert train_bpe(["ab ab"], 4_000).get_vocab_size() == 260  # "ab" and " ab"
    with pytest.raises(UserError, match="vocab_size = 257"):
        train_bpe(texts, 257)


def test_tokenizer_text_is_limited_by_whole_documents():
    texts = ["x" * 50] * 10
    assert len([*limited(texts, None)]) == 10
    assert len([*limited(texts, 20)]) == 4  # 20 tokens of at most 8 characters: 160


def test_same_spec_same_bytes(make_spec, tmp_path):
    spec = make_spec(layout=PADDED)
    one, two = prepare(spec, tmp_path / "one"), prepare(spec, tmp_path / "two")
    assert one == two
    for name in os.listdir(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_gpt2_tokenizer_from_its_two_files(tiny_wheels, make_spec, tmp_path):
    spec = make_spec(tokenizer="gpt2")
    meta = prepare(spec, tmp_path / "corpus")
    assert (meta.vocab_size, meta.eos_id, meta.pad_id) == (258, 257, None)
    tokenizer = load_tokenizer(tmp_path / "corpus")
    assert tokenizer.encode("amm").tokens == ["am", "m"]
    assert tokenizer.encode("<|endoftext|>").ids != [257]
    with pytest.raises(UserError, match="vocab_size = 257: GPT-2's tokenizer has 258"):
        prepare(make_spec(tokenizer="gpt2", vocab_size=257), tmp_path / "small")
    with pytest.raises(UserError, match='"gpt2" has no PAD'):
        prepare(make_spec(tokenizer="gpt2", layout=PADDED), tmp_path / "padded")


def test_a_complete_folder_is_verified_and_left_alone(make_spec, tmp_path):
    spec, out = make_spec(), tmp_path / "corpus"
    meta = prepare(spec, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(spec, out) == meta
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(UserError, match="prepared from another specification"):
        prepare(spec.model_copy(update={"vocab_size": 310}), out)
    with open(spec.source.train, "a") as handle:
        handle.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(UserError, match=r"text\.jsonl: changed since"):
        prepare(spec, out)
    os.unlink(spec.source.train)  # the prepared folder is enough
    assert prepare(spec, out) == meta
    (out / "test.bin").unlink()
    with pytest.raises(UserError, match=r"test\.bin: missing"):
        prepare(spec, out)


def test_remains_without_meta_are_replaced_and_foreign_files_are_not(make_spec, tmp_path):
    spec, out = make_spec(), tmp_path / "corpus"
    meta = prepare(spec, out)
    (out / "meta.json").unlink()
    (out / "train.bin").write_bytes(b"half")
    assert prepare(spec, out) == meta
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        prepare(spec, other)
    assert (other / "thesis.tex").read_text() == "precious"
    with pytest.raises(UserError, match="is a file; name a folder"):
        prepare(spec, other / "thesis.tex")


def test_a_failure_leaves_nothing(make_spec, tmp_path, monkeypatch):
    spec, root = make_spec(), tmp_path / "root"
    real = packing.write_shard

    def fail_at_test(path, split, *rest):
        if split == "test":
            raise KeyboardInterrupt
        return real(path, split, *rest)

    monkeypatch.setattr(packing, "write_shard", fail_at_test)
    with pytest.raises(KeyboardInterrupt):
        prepare(spec, root / "corpus")
    assert [*root.iterdir()] == []


def test_another_process_that_was_first_wins(make_spec, tmp_path, monkeypatch):
    spec, out = make_spec(), tmp_path / "corpus"
    rename = os.rename

    def late(source, target):
        monkeypatch.setattr(os, "rename", rename)
        prepare(spec, out)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert prepare(spec, out) == load_meta(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "text.jsonl"]


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        (["one short text"], {}, "split: too little text"),
        (["a b"] * 50, {"layout": PADDED}, "no paragraph has min_chunk = 8 tokens"),
        (None, {"layout": PADDED, "max_train_tokens": 15}, "max_train_tokens = 15: one sequence"),
        (None, {"max_eval_tokens": 1}, "max_eval_tokens = 1: one sequence takes 2"),
    ],
)
def test_too_little_text_is_one_clear_line(make_spec, tmp_path, texts, changes, message):
    with pytest.raises(UserError, match=message) as error:
        prepare(make_spec(texts, **changes), tmp_path / "root" / "corpus")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "root").exists() or not [*(tmp_path / "root").iterdir()]


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (" The 1 @,@ 000 well @-@ known ( and 2 @.@ 5 % ) , it 's . \n",
         "The 1,000 well-known (and 2.5%), it's."),
        (' He said " yes , " then left ; see " The Bill " . \n',
         'He said "yes," then left; see "The Bill".'),
        (" the players ' club did n't win $ 5 in 2006 – 07 . \n",
         "the players' club didn't win $5 in 2006–07."),
        (" = Title = \n", None),
        (" = = = Early life = = = \n", None),
        (" an <unk> word \n", None),
        (" \n", None),
        (" x = 3 is an equation . \n", "x = 3 is an equation."),
    ],
)  # fmt: skip
def test_raw_wikitext_becomes_plain(raw, plain):
    assert plain_line(raw) == plain


def test_raw_wikitext_files_are_made_plain(tmp_path):
    lines = [f" = Title {i} = \n \n The {i} @,@ 000 ships , they sailed . \n" for i in range(200)]
    (tmp_path / "wiki.txt").write_text("".join(lines))
    spec = packing.DataSpec(
        corpus="wikitext103",
        source=FileSource(train=str(tmp_path / "wiki.txt")),
        tokenizer="bpe",
        vocab_size=300,
        layout={"kind": "padded", "chunk": 16, "min_chunk": 4},
    )
    meta = prepare(spec, tmp_path / "corpus")
    tokenizer = load_tokenizer(tmp_path / "corpus")
    row = shard(tmp_path / "corpus")[:32]
    assert tokenizer.decode(row[row != meta.pad_id].tolist()).startswith("The 0,000 ships, they")


def test_further_texts_have_shards_of_their_own(tmp_path):
    (tmp_path / "train.txt").write_text("\n\n".join(f"some words, number {i}" for i in range(900)))
    (tmp_path / "wiki.txt").write_text(
        " = Title = \n \n The 7 @,@ 000 ships , they sailed . \n" * 9
    )
    wiki = {"file": str(tmp_path / "wiki.txt")}
    spec = packing.DataSpec(
        corpus="fineweb_edu",
        source=FileSource(
            train=str(tmp_path / "train.txt"),
            texts={"wiki-test": wiki | {"wikitext": True}},
        ),
        tokenizer="bpe",
        vocab_size=300,
        layout={"kind": "packed"},
    )
    meta = prepare(spec, tmp_path / "corpus")
    assert set(meta.splits) == {"train", "validation", "test", "wiki-test"}
    tokenizer = load_tokenizer(tmp_path / "corpus")
    ids = np.fromfile(tmp_path / "corpus" / "wiki-test.bin", dtype="<u2").tolist()
    assert tokenizer.decode(ids).startswith("The 7,000 ships, they sailed.")
    assert str(tmp_path / "wiki.txt") in meta.source.files
    assert prepare(spec, tmp_path / "corpus") == meta
    with pytest.raises(ValueError, match="test is a split's name"):
        FileSource(train="a.txt", texts={"test": wiki})
