"""A trained run as something that scores: its weights, its tokenizer, and the hashes that pin it.
Imports no lm-eval: scoring alone runs where it is not installed."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from mol.base import UserError, sha256_file
from mol.data.meta import CorpusMeta, check_tokenizer, load_meta
from mol.data.tokenizers import load_tokenizer
from mol.evaluate.scoring import Scorer
from mol.model.transformer import LanguageModel
from mol.plan.spec import TrainSpec, ZeroShotSpec
from mol.store.record import load_record
from mol.train.checkpoint import WEIGHTS, load_weights

BATCH = {"cpu": (32, 2048), "cuda": (512, 131_072)}  # sequences, padded tokens


@dataclass(frozen=True)
class Trained:
    """A run that zero-shot scores, without its weights."""

    run_id: str
    spec: TrainSpec
    folder: Path
    corpus: Path
    meta: CorpusMeta
    tokenizer: Tokenizer
    prefix_token: int


def open_run(spec: ZeroShotSpec, results: Path) -> Trained:
    """The run that `spec` names. Raises UserError when it or its corpus is absent, or its tokenizer
    is another one than the corpus was prepared with."""
    folder = results / "runs" / spec.scale / spec.train_run
    if not (folder / "record.json").exists():
        raise UserError(f"{folder}: not trained yet; mol train --run {spec.train_run}")
    trained = load_record(folder / "record.json").spec
    if not isinstance(trained, TrainSpec):
        raise UserError(f"{folder}: holds a {trained.kind} run, zero-shot needs a trained model")
    corpus = results / "data" / spec.scale / trained.data.folder
    meta = load_meta(corpus)
    if meta.eos_id is None:
        raise UserError(f"{corpus}: its tokenizer has no end-of-text token to condition on")
    check_tokenizer(corpus, meta)
    tokenizer = load_tokenizer(corpus)
    return Trained(spec.train_run, trained, folder, corpus, meta, tokenizer, meta.eos_id)


def pins(trained: Trained) -> dict[str, str]:
    """What the scores depend on, by hash."""
    return {
        "train_run": trained.run_id,
        "weights_sha256": sha256_file(trained.folder / WEIGHTS),
        "tokenizer_sha256": trained.meta.tokenizer_sha256,
        "source": trained.meta.source.name,
    }


def load_scorer(
    trained: Trained, max_length: int, device: torch.device, progress: bool = False
) -> Scorer:
    """Its model on `device`. Raises UserError when the weights are absent, or were trained with
    another tokenizer."""
    model = LanguageModel(trained.spec.model)
    load_weights(trained.folder, model, trained.meta.tokenizer_sha256, trained.run_id)
    batch_size, batch_tokens = BATCH[device.type]
    mixed = trained.spec.precision == "bf16" and device.type == "cuda"
    return Scorer(
        model.to(device).eval(),
        max_length=max_length,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        device=device,
        autocast=torch.bfloat16 if mixed else None,
        progress=progress,
    )
