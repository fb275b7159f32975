"""Table 7: prompt tokens a second at batch 1, random weights."""

import torch

from mol.bench.common import (
    Outcome,
    attention_backend,
    layers_compiled,
    mode_of,
    out_of_memory_noted,
    random_ids,
    random_model,
)
from mol.bench.config import PrefillBench
from mol.bench.paths import loop, stages_by
from mol.bench.timing import measure, peak_memory
from mol.model.config import ModelConfig
from mol.ops.graph import Captured

# Longer prompts keep the GPU busy without a graph, whose memory would not be shared.
GRAPH_UP_TO = 32_768


def paths_of(config: ModelConfig, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The ways to run this model: `wanted` if it has routed blocks, else only "dense"."""
    return wanted if any(layer.kind == "split" for layer in config.layers()) else ("dense",)


def run(spec: PrefillBench, device: torch.device, seed: int) -> Outcome:
    """`prefill_tokens_per_s` by model, length and path; `peak_memory` beside it on a GPU.

    A call computes every hidden state of the prompt and the logits of its last position,
    without gradients. Running out of GPU memory leaves a note in place of the figure.
    """
    metrics, notes = [], []
    for name, config in spec.models.items():
        found = _one_model(spec, name, config, device, seed)
        metrics += found.metrics
        notes += found.notes
    if device.type == "cuda":
        notes.append(
            f"up to {GRAPH_UP_TO} tokens a timed call replays a CUDA graph of the whole pass; the "
            "block loop is neither compiled nor captured"
        )
    return Outcome(metrics, notes)


def _one_model(
    spec: PrefillBench, name: str, config: ModelConfig, device: torch.device, seed: int
) -> Outcome:
    """In a function of its own, so that two models are never in memory at once."""
    metrics, notes = [], []
    model = random_model(config, device, spec.dtype, seed)
    for length in spec.lengths:
        ids_BT = random_ids(config.vocab_size, (1, length), device, seed)

        def prefill(ids_BT=ids_BT):
            return model.logits(model(ids_BT).hidden[:, -1])

        for path in paths_of(config, spec.paths):
            # The loop reads token counts on the host: neither compiled nor captured.
            looped = path == "loop"
            on_gpu = device.type == "cuda"
            captured = on_gpu and not looped and length <= GRAPH_UP_TO
            labels = {"model": name, "length": length, "path": path}
            labels["attention"] = _backend(config, length, device, spec.dtype)
            mode = mode_of(compiled=on_gpu and not looped, graphed=captured)
            mode_of_memory = mode_of(compiled=on_gpu and not looped, graphed=False)
            by_path = stages_by(model, loop) if looped else layers_compiled(model, device)
            what = f"{name}, {path}, {length} tokens"
            with torch.no_grad(), out_of_memory_noted(notes, what), by_path:
                call = Captured(prefill, ids_BT) if captured else prefill
                timing = measure(
                    lambda c=call, ids=ids_BT: c(ids), spec.warmup, spec.repeats, device
                )
                timed = labels | {"mode": mode, "statistic": "median"}
                metrics.append(timing.rate("prefill_tokens_per_s", length, timed))
                del call  # a graph keeps the memory of its intermediate results
                metrics += peak_memory(prefill, device, labels | {"mode": mode_of_memory})
    return Outcome(metrics, notes)


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
