"""Where the weights, the record and the tokenizer of a trained model lie."""

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import pydantic
from safetensors import SafetensorError, safe_open

from mol.base import UserError, one_line, reason_of, regular
from mol.data.meta import META, CorpusMeta, check_tokenizer, load_meta
from mol.model.config import ModelConfig
from mol.plan.build import Config, find_run
from mol.plan.select import SCALES, corpus_folder, run_folder
from mol.plan.spec import TrainSpec
from mol.store.record import Record, load_record
from mol.train.checkpoint import STATE, WEIGHTS


class Checkpoint(NamedTuple):
    """A trained model: its folder with the weights, architecture, the record of its run (None for
    weights alone), and the prepared corpus whose tokenizer it reads."""

    folder: Path
    run_id: str
    model: ModelConfig
    record: Record | None
    corpus: Path
    meta: CorpusMeta


def find_checkpoint(name: str, results: Path, config: Config, data: Path | None) -> Checkpoint:
    """The checkpoint that `name` means: a folder, a run_id, or a condition of the plan. `data` is
    the corpus folder where it is not found under `results`.

    Raises UserError for what is unknown, unfinished, incomplete or does not belong together.
    """
    folder = _folder(name, results, config)
    record = _finished(folder)
    metadata = _metadata(folder / WEIGHTS)
    if record is None:
        model = _stored_model(folder / WEIGHTS, metadata)
    else:
        model = record.spec.model
        if "config" in metadata and _stored_model(folder / WEIGHTS, metadata) != model:
            raise UserError(f"{folder / WEIGHTS}: of another model than the record's; train anew")
    wanted = metadata.get("tokenizer_sha256", "")
    if folder.resolve().parent.parent.name == "runs":
        results = folder.resolve().parents[2]
    corpus = data or _corpus(folder, results, record, wanted)
    meta = load_meta(corpus)
    check_tokenizer(corpus, meta, wanted)
    if meta.eos_id is None:
        raise UserError(f"{corpus}: its tokenizer has no end-of-text token to stop at")
    run_id = record.run_id if record else metadata.get("run_id") or folder.resolve().name
    return Checkpoint(folder, run_id, model, record, corpus, meta)


def _folder(name: str, results: Path, config: Config) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        raise UserError(f"{name}: not a folder; give the folder that holds {WEIGHTS}")
    if name not in ("", ".", "..") and "/" not in name:
        for scale in (config.scale, *SCALES):
            if (results / "runs" / scale / name).is_dir():
                return results / "runs" / scale / name
    folder = run_folder(results, find_run(name, config.scale, config, "train").spec)
    if not folder.is_dir():
        raise UserError(f"{folder}: not trained yet; mol train --run {name}")
    return folder


def _finished(folder: Path) -> Record | None:
    if not os.path.lexists(folder / "record.json"):
        if (folder / STATE).exists() or not (folder / WEIGHTS).exists():
            raise UserError(f"{folder}: no finished run; mol train completes it")
        return None
    record = load_record(folder / "record.json")
    if not isinstance(record.spec, TrainSpec) or record.status != "complete":
        kind = record.spec.kind if record.status == "complete" else record.status
        raise UserError(f"{folder}: holds a {kind} run, an export needs a trained model")
    return record


def _metadata(weights: Path) -> dict[str, str]:
    try:
        with safe_open(regular(weights), framework="pt") as handle:
            return handle.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{weights}: unreadable weights ({reason_of(error)}); delete the folder and train anew"
        ) from None


def _stored_model(weights: Path, metadata: dict[str, str]) -> ModelConfig:
    """The architecture that training wrote beside the weights."""
    try:
        return ModelConfig.model_validate(json.loads(metadata["config"]))
    except (KeyError, ValueError, RecursionError) as error:
        if isinstance(error, pydantic.ValidationError):
            raise one_line(error, f"{weights}: config in its metadata") from None
        raise UserError(
            f"{weights}: no architecture in its metadata and no record.json beside it; "
            "export the folder that mol train wrote"
        ) from None


def _corpus(folder: Path, results: Path, record: Record | None, tokenizer: str) -> Path:
    if record is not None:
        return corpus_folder(results, record.spec.scale, record.spec.data.folder)
    for meta in sorted(results.glob(f"data/*/*/{META}")):
        with contextlib.suppress(UserError):  # a broken corpus is not the one looked for
            if load_meta(meta.parent).tokenizer_sha256 == tokenizer:
                return meta.parent
    raise UserError(
        f"{folder}: no corpus under {results / 'data'} has its tokenizer {tokenizer[:12]}; "
        "name the corpus folder with --data"
    )
