"""What the benchmark programs share: random weights and tokens, the outcome, a full GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mol.model.config import ModelConfig
from mol.model.transformer import LanguageModel
from mol.store.record import Metric

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Outcome(NamedTuple):
    """What a program found, and what a reader of it must know."""

    metrics: list[Metric]
    notes: list[str]


def random_model(config: ModelConfig, device: torch.device, dtype: str, seed: int) -> LanguageModel:
    """A model with random weights, in evaluation mode: speed does not depend on the
    values, except that routing is as even as a fresh router makes it."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = LanguageModel(config)
    return model.to(DTYPES[dtype]).eval()


def random_ids(vocab_size: int, shape: tuple[int, ...], device: torch.device, seed: int):
    """Uniform token ids, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, shape, generator=generator).to(device)


@contextmanager
def out_of_memory_noted(notes: list[str], what: str) -> Iterator[None]:
    """Turn running out of GPU memory into a note; the figure is then absent, not zero."""
    failed = False
    try:
        yield
    except torch.OutOfMemoryError:
        failed = True
    if failed:  # outside the handler: the exception's frames hold the tensors
        notes.append(f"{what}: out of GPU memory")
        gc.collect()
        torch.cuda.empty_cache()
