"""Checkpoints: one file to resume from (`state.pt`), one with the weights (`model.safetensors`).

Both are written beside their place and renamed, so a killed job leaves the last whole one.
Neither executes code when read.
"""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from mol.base import UserError, regular, whole
from mol.ops.collectives import rank
from mol.train.distributed import gathered

STATE, WEIGHTS = "state.pt", "model.safetensors"
CONTENT = "content_sha256"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write everything a resumed run needs (tensors and plain Python values) to `state.pt`."""
    with whole(folder / STATE) as part, open(part, "wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:
            # On a full disk torch fails once more as it closes its archive.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_state(folder: Path, run_id: str, code_sha256: str | None = None) -> dict | None:
    """The saved state, or None where there is none. Raises UserError on a broken or foreign
    file, and on one of other code where `code_sha256` is given, naming it and the way out."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        regular(path)
        with zipfile.ZipFile(path) as archive:  # torch itself reads past a flipped bit
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different type for each way a file can be broken
        reason = str(error).split("\n")[0]
        raise UserError(f"{path}: unreadable checkpoint ({reason}); delete it to restart") from None
    found = state.get("run_id") if isinstance(state, dict) else None
    if found != run_id:
        raise UserError(f"{path}: belongs to run {found!r}, not {run_id!r}; delete it to restart")
    if code_sha256 and state.get("code_sha256") != code_sha256:
        raise UserError(
            f"{path}: was written by other code, and one run is of one code; delete it to "
            "restart, or go back to that code"
        )
    return state


def save_weights(folder: Path, model: nn.Module, metadata: dict[str, str]) -> None:
    """Write the weights in fp32 with `metadata` (run_id, config, tokenizer hash). Of several
    processes all must call, for the shards they hold; the first writes."""
    weights = gathered(model.state_dict())
    if rank() > 0:
        return
    tensors = {name: p.detach().float().cpu().contiguous() for name, p in weights.items()}
    with whole(folder / WEIGHTS) as part:
        try:
            save_file(tensors, part, metadata=metadata | {CONTENT: _content(tensors)})
        except SafetensorError as error:
            raise OSError(str(error)) from None


def _content(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes: the format itself does not notice a flipped bit."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode() + b"\0")
        state.update(tensors[name].numpy().data)
    return state.hexdigest()


def load_weights(
    folder: Path, model: nn.Module, tokenizer_sha256: str, run_id: str | None = None
) -> None:
    """Load `model.safetensors` into `model`, refusing another tokenizer's checkpoint and, where
    `run_id` is given, another run's.

    Raises UserError when the file is absent, broken, or does not fit model or tokenizer.
    """
    path = folder / WEIGHTS
    try:
        if path.exists():
            regular(path)
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    except FileNotFoundError:
        raise UserError(f"{path}: no weights; train the run first (mol train)") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: unreadable weights ({error}); delete the folder and retrain"
        ) from None
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        raise UserError(f"{path}: holds other than fp32 weights; delete the folder and retrain")
    if metadata.get(CONTENT, "") not in ("", _content(tensors)):
        raise UserError(f"{path}: unreadable weights (damaged); delete the folder and retrain")
    if run_id and metadata.get("run_id") != run_id:
        raise UserError(
            f"{path}: belongs to run {metadata.get('run_id')!r}, not {run_id!r}; "
            "delete the folder and retrain"
        )
    trained_with = metadata.get("tokenizer_sha256")
    if trained_with != tokenizer_sha256:
        raise UserError(
            f"{path}: trained with tokenizer {str(trained_with)[:12]}, the corpus has "
            f"{tokenizer_sha256[:12]}; prepare the corpus it was trained on"
        )
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: does not fit the run's model ({reason})") from None
