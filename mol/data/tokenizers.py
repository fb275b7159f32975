"""The two tokenizers of the paper (4.1): a byte-level BPE trained here, and GPT-2's."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mol.base import UserError, regular
from mol.data.meta import TOKEN_BYTES, TOKENIZER

PAD, EOS, GPT2_EOS = "<pad>", "<eos>", "<|endoftext|>"
CHARACTERS_PER_TOKEN = 8  # above any English tokenizer's mean, so no packed text is left unseen


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a corpus folder, for text that may hold the special tokens' spelling:
    such text gives ordinary tokens, never PAD or end-of-text."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / TOKENIZER))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with <pad> = 0 and <eos> = 1. Deterministic; a short text may end with
    fewer than `vocab_size` tokens. UserError if `vocab_size` cannot hold the 256 bytes."""
    if vocab_size < 258:
        raise UserError(f"vocab_size = {vocab_size}: byte-level BPE needs at least 258")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def limited(texts: Iterable[str], max_tokens: int | None) -> Iterator[str]:
    """As many of the texts as `max_tokens` tokens can take up, whole."""
    if max_tokens is None:
        yield from texts
        return
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= CHARACTERS_PER_TOKEN * max_tokens:
            return


def gpt2_tokenizer(encoder_json: bytes, vocab_bpe: bytes) -> Tokenizer:
    """GPT-2's tokenizer from its two files; <|endoftext|> ends a document, there is no PAD."""
    vocab = json.loads(encoder_json)
    lines = vocab_bpe.decode().split("\n")
    merges = [tuple(line.split()) for line in itertools.islice(lines, 1, None) if line.strip()]
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(GPT2_EOS, special=True, normalized=False)])
    assert tokenizer.token_to_id(GPT2_EOS) == vocab[GPT2_EOS]
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text behind each token id, int32 [V]; special tokens have none.

    A byte-level token is spelled with one character a byte, so its length is its size.
    """
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int32)
    special = {PAD, EOS, GPT2_EOS}
    for token, index in tokenizer.get_vocab().items():
        if token not in special:
            sizes[index] = len(token)
    return sizes


def load_token_bytes(folder: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The sizes in a corpus folder, as `token_bytes` gives them. UserError if they are not those
    of its tokenizer: figures per byte would be wrong without a sign of it."""
    path = Path(folder) / TOKEN_BYTES
    try:
        sizes_V = np.load(regular(path))
    except (OSError, ValueError, EOFError):
        sizes_V = None
    if sizes_V is None or not np.array_equal(sizes_V, token_bytes(tokenizer)):
        raise UserError(f"{path}: absent or damaged; delete the folder and prepare it again")
    return sizes_V
