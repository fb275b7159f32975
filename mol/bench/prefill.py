"""Table 7: prompt tokens a second at batch 1, random weights."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mol.bench.common import (
    Outcome,
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
from mol.ops.gated_delta import by_fla
from mol.ops.graph import Captured

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
    without gradients. Running out of GPU memory leaves a note in place of the figure. On a CPU
    both run eagerly with torch's choice of attention.
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
    fast = spec.run_as == "fastest" and device.type == "cuda"
    for length in spec.lengths:
        ids_BT = random_ids(config.vocab_size, (1, length), device, seed)

        def prefill(ids_BT=ids_BT):
            return model.logits(model(ids_BT).hidden[:, -1])

        for path in paths_of(config, spec.paths):
            # The stage in one pass is written as few kernels already; a dense layer is not.
            compiled = fast and path == "dense"
            graphed = fast and path not in HOST_PATHS and length <= GRAPH_UP_TO
            what = f"{name}, {path}, {length} tokens"
            with (
                torch.no_grad(),
                out_of_memory_noted(notes, what),
                _run_by(model, path, spec.run_as, compiled, device),
            ):
                labels = {"model": name, "length": length, "path": path}
                labels["attention"] = _backend(config, length, device, spec.dtype)
                call = Captured(prefill, ids_BT) if graphed else prefill
                watch_memory(device)
                timing = measure(
                    lambda c=call, ids=ids_BT: c(ids), spec.warmup, spec.repeats, device
                )
                mean = spec.run_as == "paper"
                mode = mode_of(compiled=compiled, graphed=graphed)
                timed = labels | {"mode": mode, "statistic": "mean" if mean else "median"}
                metrics.append(told(timing.rate("prefill_tokens_per_s", length, timed, mean)))
                del call
                if graphed:  # a graph keeps the memory of its intermediate results
                    watch_memory(device)
                    prefill()
                without = mode_of(compiled=compiled, graphed=False)
                metrics += peak_memory(device, labels | {"mode": without})
    return Outcome(metrics, notes)


@contextmanager
def _run_by(
    model: LanguageModel, path: str, run_as: str, compiled: bool, device: torch.device
) -> Iterator[None]:
    """Inside, the model runs by this path; if as the paper, with its kernels on a GPU, those of
    FlashAttention-2 and flash-linear-attention."""
    flash = run_as == "paper" and device.type == "cuda"
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext())
        if flash:
            stack.enter_context(by_fla())
        if path in HOST_PATHS:
            stack.enter_context(stages_by(model, HOST_PATHS[path]))
        if compiled:
            stack.enter_context(layers_compiled(model, device))
        yield


def _backend(config: ModelConfig, length: int, device: torch.device, dtype: str) -> str:
    """Which attention runs in a full-width layer or in the shared blocks; "none" where no layer
    attends by softmax."""
    layer = config.layer
    split = layer.kind == "split"
    attention = getattr(layer, "attention", "softmax")  # full-width mixtures have no choice
    if attention == "deltanet" and not (split and layer.n_shared):
        return "none"
    width = layer.d_thin if split else config.d_model
    return attention_backend(layer.n_heads, width // layer.n_heads, length, device, dtype)
