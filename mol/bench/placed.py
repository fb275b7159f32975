"""Appendix F on this machine: ranks of one process each that speak gloo, one thread a rank.

Each way runs the same forward and backward pass of the same sequences. `one`: one process. `ddp`:
whole models, a share of the sequences each. `all_to_all` and `all_reduce`: the two schemes of
`mol.model.block_parallel`. Memory is weights, gradients and what autograd keeps of the forward
pass, counted by its hooks: what an allocator or a library holds beside them is not. Time is that of
the slowest rank.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mol.model.block_parallel import ExchangedStage, SummedStage, combine_gradients, placed
from mol.model.config import ModelConfig
from mol.model.transformer import LanguageModel
from mol.ops.collectives import rank, world
from mol.ops.saved import Saved

SCHEMES = {"all_to_all": ExchangedStage, "all_reduce": SummedStage}
SEQUENCES = 6  # of all ranks together
REPEATS = 3
PATIENCE = timedelta(seconds=120)


class Measured(NamedTuple):
    """One way on a number of ranks: bytes of the fullest rank, and of each repeat the ms of the
    slowest."""

    way: str
    ranks: int
    memory: int
    samples: tuple[float, ...]


def measure(
    model: ModelConfig, numbers: tuple[int, ...], seq_len: int, seed: int
) -> list[Measured]:
    """Each way on each number of ranks, in processes forked from this one: one layer of `model`,
    with widths cut in half and next to no vocabulary."""
    import torch._dynamo  # noqa: F401  as DDP does: once, before each rank would

    layer = model.layer
    narrow = layer.model_copy(update={"d_thin": layer.d_thin // 2, "d_ff": layer.d_ff // 2})
    small = {"vocab_size": 64, "d_model": model.d_model // 2, "n_layers": 1, "layer": narrow}
    config = model.model_copy(update=small)
    found = []
    fork = multiprocessing.get_context("fork")
    for ranks in (1, *numbers):
        ways = ("one",) if ranks == 1 else ("ddp", *SCHEMES)
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, fork) as pool:
            run = partial(_as_rank, ranks, folder, ways, config, seq_len, seed)
            every = list(pool.map(run, range(ranks)))
        for way, results in zip(ways, zip(*every, strict=True), strict=True):
            memory = max(memory for memory, _ in results)
            samples = tuple(map(max, zip(*(ms for _, ms in results), strict=True)))
            found.append(Measured(way, ranks, memory, samples))
    return found


def _as_rank(
    ranks: int, folder: str, ways, config: ModelConfig, seq_len: int, seed: int, index: int
) -> list[tuple[int, list[float]]]:
    torch.set_num_threads(1)
    if ranks == 1:
        return _all_ways(ways, config, seq_len, seed)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=index, world_size=ranks, timeout=PATIENCE
    )
    found = _all_ways(ways, config, seq_len, seed)
    # After DDP's model, never before: its reducer would be the group's last owner, and waits with
    # the interpreter's lock for a thread of the group that may want that lock (torch 2.13).
    dist.destroy_process_group()
    return found


def _all_ways(ways, config: ModelConfig, seq_len: int, seed: int) -> list[tuple[int, list[float]]]:
    """Of each way: bytes of this rank, and ms of each repeat."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(config.vocab_size, (SEQUENCES, seq_len), generator=generator)
    memory, steps = [], []
    for way in ways:
        torch.manual_seed(seed)
        model = LanguageModel(config)
        step = _step(model, way, ids_BT)
        with Saved(model.parameters()) as saved:
            step()
        memory.append(saved.bytes + sum(p.nbytes + p.grad.nbytes for p in model.parameters()))
        del saved  # which holds the tensors
        steps.append(step)
    samples = [[] for _ in ways]
    for _ in range(REPEATS):  # in turn, so that what else the machine does falls on all ways alike
        for step, taken in zip(steps, samples, strict=True):
            if world() > 1:
                dist.barrier()
            started = time.perf_counter()
            step()
            taken.append(1e3 * (time.perf_counter() - started))
    return list(zip(memory, samples, strict=True))


def _step(model: LanguageModel, way: str, ids_BT: torch.Tensor) -> Callable[[], None]:
    """A call that leaves the gradients of the mean over all sequences."""
    net: nn.Module = model
    scheme = SCHEMES.get(way)
    if scheme is not None:
        placed(model, scheme)
    elif way == "ddp":
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way != "all_reduce":
        ids_BT = ids_BT[rank() * len(ids_BT) // world() : (rank() + 1) * len(ids_BT) // world()]

    def step() -> None:
        model.zero_grad(set_to_none=way != "ddp")  # DDP's lie in its buckets
        output = net(ids_BT)
        (output.hidden.square().mean() + output.balance).backward()
        if way == "all_to_all":
            combine_gradients(model)

    return step
