"""Training tokens a second of the step that `mol train` runs, condition by condition."""

import torch

from mol.bench.common import Outcome, mode_of, out_of_memory_noted, random_ids, told
from mol.bench.config import TrainStepBench, TrainStepCase
from mol.bench.mfu import mfu
from mol.bench.timing import measure, peak_memory, watch_memory
from mol.model.transformer import LanguageModel
from mol.plan.spec import OptimSpec
from mol.store.record import Metric
from mol.train.environment import hardware
from mol.train.step import EAGER_STEPS, TrainStep

# Steps of one timing on a GPU: in training the host runs ahead, and only the first step of a
# series waits for it.
SERIES = 10


def run(spec: TrainStepBench, device: torch.device, seed: int) -> Outcome:
    """`train_tokens_per_s` of each case, `mfu` where the GPU's peak is known, and `peak_memory` on
    a GPU. Weights are fp32; bf16 is autocast, as in training."""
    metrics, notes = [], []
    for name, case in spec.cases.items():
        what = f"{name}, {case.batch_size} x {case.seq_len}"
        with out_of_memory_noted(notes, what):
            found, formula = _time(name, case, spec, device, seed)
            metrics += found
            notes.append(f"{what}: {formula}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Outcome(metrics, notes)


def _time(
    name: str, case: TrainStepCase, spec: TrainStepBench, device: torch.device, seed: int
) -> tuple[list[Metric], str]:
    watch_memory(device)
    torch.manual_seed(seed)
    with torch.device(device):
        model = LanguageModel(case.model)
    optim = OptimSpec(
        steps=1, lr=3e-4, warmup_steps=0, **case.model_dump(exclude={"model", "seq_len"})
    )
    replayed = spec.run_as == "graph"
    step = TrainStep(model, optim, case.seq_len, device, spec.dtype == "bf16", replayed)
    batches = _batches(case, seed)
    series = SERIES if device.type == "cuda" else 1

    def steps() -> None:
        for _ in range(series):
            step(batches, optim.lr)

    for _ in range(EAGER_STEPS + 1 if step.replayed else 0):
        step(batches, optim.lr)
    timing = measure(steps, spec.warmup, spec.repeats, device)
    step.figures()
    labels = {
        "model": name,
        "length": case.seq_len,
        "batch": case.batch_size,
        "micro_batches": case.accumulate,
        "recomputed": case.checkpoint_activations,
        "mode": mode_of(compiled=False, graphed=step.graph is not None),
    }
    tokens = case.batch_size * case.seq_len
    rate = told(timing.rate("train_tokens_per_s", series * tokens, labels))
    share, formula = mfu(case.model, case.seq_len, rate.value, hardware(device).name)
    metrics = [rate]
    if share is not None:
        metrics.append(told(Metric(name="mfu", value=share, unit="fraction", labels=labels)))
    return metrics + [told(m) for m in peak_memory(device, labels)], formula


def _batches(case: TrainStepCase, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Random tokens as the loader hands them over, on the host."""
    rows = case.batch_size // case.accumulate
    found = []
    for micro in range(case.accumulate):
        shape = rows, case.seq_len + 1
        ids = random_ids(case.model.vocab_size, shape, torch.device("cpu"), seed + micro)
        real = torch.ones(rows, case.seq_len, dtype=torch.bool)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), real))
    return found
