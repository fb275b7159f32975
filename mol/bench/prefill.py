"""Table 7: prompt tokens a second at batch 1, random weights."""

from contextlib import nullcontext

import torch

from mol.bench.common import Outcome, out_of_memory_noted, random_ids, random_model
from mol.bench.config import PrefillBench
from mol.bench.paths import loop, stages_by
from mol.bench.timing import measure, peak_memory
from mol.model.config import ModelConfig


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
            labels = {"model": name, "length": length, "path": path}
            by_path = stages_by(model, loop) if path == "loop" else nullcontext()
            what = f"{name}, {path}, {length} tokens"
            with torch.no_grad(), out_of_memory_noted(notes, what), by_path:
                timing = measure(prefill, spec.warmup, spec.repeats, device)
                metrics.append(timing.rate("prefill_tokens_per_s", length, labels))
                metrics += peak_memory(prefill, device, labels)
    return Outcome(metrics, notes)
