"""Table 7: prompt tokens a second at batch 1, random weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product

import torch

from mol.bench.common import (
    Outcome,
    absence_noted,
    attention_backend,
    layers_compiled,
    mode_of,
    out_of_memory_noted,
    random_ids,
    random_model,
    told,
)
from mol.bench.config import PrefillBench
from mol.bench.timing import measure, peak_memory, watch_memory
from mol.model.batched import batched
from mol.model.config import ModelConfig
from mol.model.paths import loop, stages_by
from mol.model.transformer import LanguageModel
from mol.ops.attention_by import PACKAGE, attention_by
from mol.ops.gated_delta import by_fla
from mol.ops.graph import Captured
from mol.store.record import Metric

# Longer prompts keep the GPU busy without a graph, whose memory would not be shared.
GRAPH_UP_TO = 32_768
# These read token counts on the host, so they can be neither compiled nor captured.
HOST_PATHS = {"loop": loop, "batched": batched}


def paths_of(config: ModelConfig, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The ways to run this model: `wanted` if it has routed blocks, else only "dense"."""
    return wanted if any(layer.kind == "split" for layer in config.layers()) else ("dense",)


def run(spec: PrefillBench, device: torch.device, seed: int) -> Outcome:
    """`prefill_tokens_per_s` by model, length and path; `peak_memory` beside it on a GPU.

    A call computes every hidden state of the prompt and the logits of its last position,
    without gradients. Running out of GPU memory leaves a note in place of the figure, as does a
    back end that is not to be had. On a CPU both run eagerly with torch's choice of attention.
    """
    metrics, notes = [], []
    for name, config in spec.models.items():
        found = _one_model(spec, name, config, device, seed)
        metrics += found.metrics
        notes += found.notes
    return Outcome(metrics, notes)


def _one_model(
    spec: PrefillBench, name: str, config: ModelConfig, device: torch.device, seed: int
) -> Outcome:
    """In a function of its own, so that two models are never in memory at once."""
    metrics, notes = [], []
    model = random_model(config, device, spec.dtype, seed)
    back_ends = spec.attention if _attends(config) else ()
    for path, back_end in product(paths_of(config, spec.paths), back_ends or (None,)):
        way = ", ".join(filter(None, (name, path, back_end)))
        with absence_noted(notes, way), _run_by(model, path, back_end, spec, device):
            for length in spec.lengths:
                labels = {"model": name, "length": length, "path": path}
                labels["attention"] = _backend(config, length, device, spec.dtype, back_end)
                with out_of_memory_noted(notes, f"{way}, {length} tokens"):
                    ids_BT = random_ids(config.vocab_size, (1, length), device, seed)
                    metrics += _one_length(spec, model, ids_BT, labels, device)
    return Outcome(metrics, notes)


@torch.no_grad()
def _one_length(
    spec: PrefillBench,
    model: LanguageModel,
    ids_BT: torch.Tensor,
    labels: dict,
    device: torch.device,
) -> list[Metric]:
    length, path = labels["length"], labels["path"]
    fast = _fast(spec, device)
    compiled = fast and path == "dense"
    graphed = fast and path not in HOST_PATHS and length <= GRAPH_UP_TO

    def prefill(ids_BT=ids_BT):
        return model.logits(model(ids_BT).hidden[:, -1])

    call = Captured(prefill, ids_BT) if graphed else prefill
    watch_memory(device)
    timing = measure(lambda c=call: c(ids_BT), spec.warmup, spec.repeats, device)
    mean = spec.run_as == "paper"
    mode = mode_of(compiled=compiled, graphed=graphed)
    timed = labels | {"mode": mode, "statistic": "mean" if mean else "median"}
    rate = told(timing.rate("prefill_tokens_per_s", length, timed, mean))
    del call
    if graphed:  # a graph keeps the memory of its intermediate results
        watch_memory(device)
        prefill()
    without = mode_of(compiled=compiled, graphed=False)
    return [rate, *peak_memory(device, labels | {"mode": without})]


def _fast(spec: PrefillBench, device: torch.device) -> bool:
    return spec.run_as == "fastest" and device.type == "cuda"


@contextmanager
def _run_by(
    model: LanguageModel,
    path: str,
    back_end: str | None,
    spec: PrefillBench,
    device: torch.device,
) -> Iterator[None]:
    """Inside, the model runs by this path and this library's attention; if as the paper, with its
    kernels on a GPU, those of FlashAttention-2 and flash-linear-attention."""
    paper = spec.run_as == "paper" and device.type == "cuda"
    back_end = back_end or ("flash" if paper else None)
    with ExitStack() as stack:
        if back_end:
            stack.enter_context(attention_by(back_end))
        if paper:
            stack.enter_context(by_fla())
        if path in HOST_PATHS:
            stack.enter_context(stages_by(model, HOST_PATHS[path]))
        # The stage in one pass is written as few kernels already; a dense layer is not.
        if path == "dense" and _fast(spec, device):
            stack.enter_context(layers_compiled(model, device))
        yield


def _attends(config: ModelConfig) -> bool:
    """Whether any block or layer attends by softmax."""
    layer = config.layer
    attention = getattr(layer, "attention", "softmax")  # full-width mixtures have no choice
    return attention == "softmax" or (layer.kind == "split" and layer.n_shared > 0)


def _backend(
    config: ModelConfig, length: int, device: torch.device, dtype: str, back_end: str | None
) -> str:
    """Which attention runs in a full-width layer or in the shared blocks; "none" where no layer
    attends by softmax."""
    if not _attends(config):
        return "none"
    if back_end == PACKAGE:
        return PACKAGE
    layer = config.layer
    width = layer.d_thin if layer.kind == "split" else config.d_model
    return attention_backend(layer.n_heads, width // layer.n_heads, length, device, dtype)
