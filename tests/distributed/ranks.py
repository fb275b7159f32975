"""Ranks for the tests: forked processes that find each other as those of torchrun do."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from processes import FORK, SERVED, Done, finish, start

from mol.cli import main
from mol.train import distributed
from mol.train.loop import Trainer

# Loaded once by the server that the ranks are forked from; DDP and FSDP2 would load them in each.
LOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
FORK.set_forkserver_preload([*SERVED, *LOADED])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def together(folder: Path, world: int, target: Callable, *args) -> list[Done]:
    """Run `target(*args)` on `world` ranks; a hang fails the test."""
    port, running = free_port(), []
    for rank in range(world):
        place = folder / f"rank{rank}"
        place.mkdir(parents=True, exist_ok=True)
        running.append((place, start(place, _as_rank, rank, world, port, target, args)))
    until = time.monotonic() + 60
    for _, process in running:
        process.join(max(0, until - time.monotonic()))
    hanging = [process for _, process in running if process.exitcode is None]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {world} ranks hang"
    return [finish(place, process) for place, process in running]


def _as_rank(rank: int, world: int, port: int, target: Callable, args: tuple) -> int:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    return target(*args)


def train(argv: list[str], shard_from: int, die: tuple[int, int] | None = None) -> int:
    """`mol train`; models of `shard_from` weights are sharded, and rank `die[0]` is gone when
    `die[1]` steps are done."""
    distributed.SHARD_FROM = shard_from
    go_on = Trainer.train_step

    def train_step(trainer):
        if die == (dist.get_rank(), trainer.step):
            os._exit(9)
        return go_on(trainer)

    if die:
        Trainer.train_step = train_step
    return main(argv)
