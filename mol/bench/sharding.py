"""Appendix F: routed blocks placed on several devices: weights and traffic counted, and memory and
time of small ranks on this machine's CPU measured (`mol.bench.placed`).

Placement: of each split stage, device i holds a contiguous run of the routed blocks, runs as
even as they can be; embedding, norms, routers and shared blocks stand on every device. The
model is built on the meta device and its own tensors are counted.

The paper prints a reduction of 38 % for 14 blocks on 3 GPUs and names neither the model nor what
is copied. It does not come out of this placement: the 198M model saves half (`mol bench sharding`),
since its fullest device holds 5 of 14 blocks and what is copied is a fifth of the weights. For
38 % about two fifths would have to be copied.
"""

import os

import torch

from mol.bench.common import Outcome
from mol.bench.config import ShardingBench
from mol.bench.placed import SEQUENCES, measure
from mol.bench.timing import Timing
from mol.model.block_parallel import expected_exchange, placement
from mol.model.config import ModelConfig, SplitLayer
from mol.model.split_stage import SplitStage
from mol.model.transformer import LanguageModel
from mol.store.record import Metric

BYTES = 2  # of an activation in bf16


def parameters_per_device(config: ModelConfig, devices: int) -> tuple[list[int], int]:
    """Weights that each device holds, and those of the whole model."""
    with torch.device("meta"):
        model = LanguageModel(config)
    total = sum(p.numel() for p in model.parameters())
    stages = [m for m in model.modules() if isinstance(m, SplitStage)]
    routed = 0
    held = [0] * devices
    for stage in stages:
        per_block = sum(p[0].numel() for p in stage.routed.parameters())
        for device, blocks in enumerate(placement(stage.config.n_routed, devices)):
            held[device] += blocks * per_block
        routed += stage.config.n_routed * per_block
    return [total - routed + h for h in held], total


def bytes_per_token(config: ModelConfig, devices: int, size: int = BYTES) -> dict[str, float]:
    """Bytes that cross between devices for one token's forward pass, by scheme; numbers of `size`.

    all_to_all: `ExchangedStage`, expected for blocks that are chosen equally often, without the
    tables of a few bytes a sequence. all_reduce: tokens stand on every device and a stage sums its
    D-vector once, 2 (n - 1) D in a ring. tensor_parallel: Megatron's two such sums a layer.
    """
    splits = [layer for layer in config.layers() if isinstance(layer, SplitLayer)]
    vector = size * config.d_model
    ring = 2 * (devices - 1) * vector

    def exchanged(layer: SplitLayer) -> float:
        share = 1 / devices  # of the token that each device brings
        return sum(
            expected_exchange(layer, devices, held, share, 0)._replace(ahead=0).forward(vector)
            for held in placement(layer.n_routed, devices)
        )

    return {
        "all_to_all": sum(map(exchanged, splits)),
        "all_reduce": len(splits) * ring,
        "tensor_parallel": 2 * config.n_layers * ring,
    }


def run(spec: ShardingBench, device: torch.device, seed: int) -> Outcome:
    """`params_per_device` of each device, `params_reduction` of the fullest one against the
    whole model, `all_reduce_per_stage` against tensor parallelism's `all_reduce_per_layer`, and
    `bytes_per_token` by scheme; `rank_memory` and `rank_step_ms` by way and number of `ranks`."""

    def metric(name: str, value: float, unit: str, **labels) -> Metric:
        return Metric(name=name, value=value, unit=unit, labels={"method": "analytic"} | labels)

    held, total = parameters_per_device(spec.model, spec.devices)
    metrics = [metric("params_per_device", count, "count", index=i) for i, count in enumerate(held)]
    metrics.append(metric("params_reduction", 1 - max(held) / total, "fraction"))
    # One sum over all blocks ends a stage; Megatron sums after attention and after the FFN.
    metrics.append(metric("all_reduce_per_stage", 1, "count", scheme="all_reduce"))
    metrics.append(metric("all_reduce_per_layer", 2, "count", scheme="tensor_parallel"))
    for scheme, value in bytes_per_token(spec.model, spec.devices).items():
        metrics.append(metric("bytes_per_token", value, "byte", scheme=scheme))
    notes = ["parameters and traffic are counted from the model's tensors; no GPU was timed"]
    if spec.ranks:
        metrics += _measured(spec, seed)
        notes.append(
            "rank_memory and rank_step_ms: one layer at half the width, "
            f"{SEQUENCES} x {spec.seq_len} tokens, processes of one thread on {os.cpu_count()} "
            "cores through gloo; no GPU's figures"
        )
    return Outcome(metrics, notes)


def _measured(spec: ShardingBench, seed: int) -> list[Metric]:
    metrics = []
    for found in measure(spec.model, spec.ranks, spec.seq_len, seed):
        labels = {
            "method": "measured", "device": "cpu", "backend": "gloo", "way": found.way,
            "ranks": found.ranks,
        }  # fmt: skip
        memory = Metric(name="rank_memory", value=found.memory, unit="byte", labels=labels)
        metrics += [memory, Timing(found.samples).duration("rank_step_ms", "ms", labels)]
    return metrics
