"""Training tokens a second of one condition: forward, loss, backward, clip, AdamW update."""

import torch

from mol.bench.common import (
    DTYPES,
    Outcome,
    out_of_memory_noted,
    random_ids,
    random_model,
    told,
)
from mol.bench.config import TrainStepBench
from mol.bench.timing import measure, peak_memory, watch_memory
from mol.ops.cross_entropy import linear_cross_entropy
from mol.plan.spec import OptimSpec
from mol.train.optimizer import AdamW


def run(spec: TrainStepBench, device: torch.device, seed: int) -> Outcome:
    """`train_tokens_per_s` of each model, and `peak_memory` on a GPU. Weights are fp32; bf16
    is autocast around the forward pass, as in training."""
    metrics, notes = [], []
    optim = OptimSpec(steps=1, batch_size=spec.batch_size, lr=3e-4, warmup_steps=0)
    for name, config in spec.models.items():
        labels = {"model": name, "length": spec.seq_len, "batch": spec.batch_size}
        model = random_model(config, device, "fp32", seed).train()
        optimizer = AdamW(model, optim)
        ids = random_ids(config.vocab_size, (spec.batch_size, spec.seq_len + 1), device, seed)
        inputs_BT, targets_BT = ids[:, :-1], ids[:, 1:]

        def step(model=model, optimizer=optimizer, inputs_BT=inputs_BT, targets_BT=targets_BT):
            with torch.autocast(device.type, DTYPES["bf16"], enabled=spec.dtype == "bf16"):
                out = model(inputs_BT)
                nll = linear_cross_entropy(
                    out.hidden.flatten(0, 1), model.embedding.weight, targets_BT.flatten()
                )
            (nll.mean() + optim.balance_alpha * out.balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
            optimizer.step(optim.lr)
            model.zero_grad(set_to_none=True)

        with out_of_memory_noted(notes, f"{name}, {spec.batch_size} x {spec.seq_len}"):
            watch_memory(device)
            timing = measure(step, spec.warmup, spec.repeats, device)
            metrics.append(told(timing.rate("train_tokens_per_s", targets_BT.numel(), labels)))
            metrics += peak_memory(device, labels)
    return Outcome(metrics, notes)
