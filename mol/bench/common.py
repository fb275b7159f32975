"""What the benchmark programs share: random weights and tokens, the outcome, a full GPU."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from mol.model.config import ModelConfig
from mol.model.transformer import FullWidthLayer, LanguageModel
from mol.ops.tracing import compiled
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
def layers_compiled(
    model: LanguageModel, device: torch.device, step: bool = False
) -> Iterator[None]:
    """Inside, full-width layers run through torch.compile on a GPU, one trace for all of a kind and
    all lengths; so do the decode steps of all layers if `step`. A split stage's forward pass
    consists of the project's kernels already. On a CPU nothing changes: a trace takes longer than
    what is timed there."""
    if device.type != "cuda":
        yield
        return
    torch._dynamo.config.recompile_limit = 32  # kinds of layer, of block and of batch
    for layer in model.layers:
        if isinstance(layer, FullWidthLayer):
            layer.forward = compiled(layer.forward, dynamic=True)
        if step:
            layer.step = compiled(layer.step)
    try:
        yield
    finally:
        for layer in model.layers:
            for name in ("forward", "step"):
                vars(layer).pop(name, None)  # uncovers the method of the class
        torch._dynamo.reset()  # a trace has its attention's library chosen, and no guard for it


def attention_backend(heads: int, width: int, length: int, device: torch.device, dtype: str) -> str:
    """Which of its back ends torch takes for causal attention of this shape: flash, cudnn ..."""
    q = torch.empty(1, heads, length, width, device=device, dtype=DTYPES[dtype])
    name = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    return name.lower().removesuffix("_attention")


def mode_of(*, compiled: bool, graphed: bool) -> str:
    """The label `mode` of a timing: how its calls ran. The report reads it to keep figures of
    another mode from judging the paper's, which are eager (Table 7, 5.5)."""
    return {
        (False, False): "eager",
        (True, False): "compiled",
        (False, True): "graph",
        (True, True): "compiled_graph",
    }[compiled, graphed]


def without_tuning_by_length() -> None:
    """Give flash-linear-attention's L2 norm one launch shape. It would be tuned anew, 25 kernels
    compiled, for every length that it meets; the norm is a small part of the time. Has to
    be called before that package is first used."""
    os.environ.setdefault("FLA_CACHE_MODE", "default")
    os.environ.setdefault("FLA_CONFIG_DIR", str(Path(__file__).parent / "fla"))


def told(metric: Metric) -> Metric:
    """The metric, after a line about it on the error stream: long benchmarks show how far they are,
    and what they had found if they are stopped."""
    labels = " ".join(f"{key}={value}" for key, value in metric.labels.items())
    print(f"{metric.name} {labels}: {metric.value:.5g} {metric.unit}", file=sys.stderr, flush=True)
    return metric


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


@contextmanager
def absence_noted(notes: list[str], what: str) -> Iterator[None]:
    """Turn a library that is not installed, or an attention back end that does not take what is
    timed here, into a note."""
    try:
        yield
    except ImportError as error:
        notes.append(f"{what}: {error}")
    except RuntimeError as error:
        refusals = "No viable backend", "No available kernel", "FlashAttention only"
        if not str(error).startswith(refusals):
            raise
        notes.append(f"{what}: this back end takes no such attention here")
