"""Training by several processes, one a device, that torchrun started.

Every rank takes its share of the same global batch, and all together compute what one process
would: loss, balance loss, gradient, its norm and clipping, up to the order of sums. Models below
`SHARD_FROM` weights are replicated (DDP), larger ones sharded layer by layer (FSDP2). The first
rank alone writes; a checkpoint holds whole tensors, so any number of processes resumes it.
"""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mol.base import UserError, reason_of
from mol.ops.collectives import rank, world

# Weights, gradients and both moments of a model of this size take 8 GB, which every GPU that the
# paper names holds beside activations. Of the paper's models, those of E11 are larger.
SHARD_FROM = 500_000_000

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PATIENCE = timedelta(hours=1)  # for the first rank to prepare a corpus, or to write a checkpoint


def _variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        found = os.environ.get(name, "nothing")
        raise UserError(
            f"{name} = {found}: no number, while WORLD_SIZE asks for several processes; "
            "start them with torchrun"
        ) from None


def _end_with_launcher() -> None:
    """torchrun does not hand on what it inherits, so the locks on its GPUs (`mol.gpus`) go when it
    is killed: no process that it started may outlive it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """Inside, this process is one of those that torchrun started; gives its own device.

    Without torchrun, or alone, nothing happens. UserError where another process is lost.
    """
    if "WORLD_SIZE" not in os.environ or _variable("WORLD_SIZE") == 1:
        yield device
        return
    for name in ("RANK", "LOCAL_RANK"):
        _variable(name)
    _end_with_launcher()
    if device.type == "cuda":
        local, present = _variable("LOCAL_RANK"), torch.cuda.device_count()
        if local >= present:
            raise UserError(f"LOCAL_RANK = {local}: {present} GPUs here; start no more processes")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes do not find each other ({reason_of(error)[:200]})"
        ) from None
    try:
        yield device
    except RuntimeError as error:
        # Gloo raises a plain RuntimeError for a closed connection, NCCL a DistBackendError.
        gone = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if not gone or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"process {rank()} of {world()} stops: another one ended or no longer answers. The "
            "last checkpoint is kept; the same command resumes, with any number of processes"
        ) from None
    # Only here: after a failure the others would be waited for.
    dist.destroy_process_group()


def first_before_others(action) -> None:
    """Call `action` on the first rank, then on the others, which find its work done."""
    if rank() == 0:
        action()
    if world() > 1:
        dist.barrier()
    if rank() > 0:
        action()


def spread(model: nn.Module, device: torch.device) -> nn.Module:
    """The module to call for a forward pass that is trained on. `model`, whose weights are the same
    on every rank, stays the one to evaluate and save."""
    if world() == 1:
        return model
    if sum(p.numel() for p in model.parameters()) < SHARD_FROM:
        devices = None if device.type == "cpu" else [device]
        return nn.parallel.DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A layer returns a view of its rows. The caution is for models that change it in place, as none
    # of ours does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (world(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def put_back(model: nn.Module) -> None:
    """To be called after forward passes that no backward pass follows: FSDP2 leaves embedding and
    norm whole, and `zero_grad` and the optimizer would miss their shards."""
    if hasattr(model, "reshard"):
        model.reshard()


def way(model: nn.Module) -> str:
    """How the ranks share the model, for the record."""
    return "fsdp2" if any(map(_is_sharded, model.parameters())) else "ddp"


def held_back(net: nn.Module, last: bool) -> AbstractContextManager:
    """Around a micro-batch: DDP sends gradients after the `last` one alone. FSDP2 sends each time,
    since whole gradients kept between micro-batches would undo its saving."""
    replicated = isinstance(net, nn.parallel.DistributedDataParallel)
    return net.no_sync() if replicated and not last else nullcontext()


def mean_of_ranks(x: Tensor) -> Tensor:
    """Mean over ranks of a number, without a gradient."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
        x /= world()
    return x


def as_first(value: float, device: torch.device) -> float:
    """The first rank's value of what the ranks' clocks or disks may disagree on."""
    if world() == 1:
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    return told.item()


def clip_gradients(model: nn.Module, largest: float) -> Tensor:
    """Scale the gradient of all weights to at most this norm; returns the norm it had."""
    weights = [p for p in model.parameters() if p.grad is not None]
    norm = _whole(nn.utils.get_total_norm([p.grad for p in weights]))
    nn.utils.clip_grads_with_norm_(weights, largest, norm)
    return norm


def _is_sharded(x: Tensor) -> bool:
    return world() > 1 and hasattr(x, "full_tensor")


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if _is_sharded(x) else x


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors from shards, one after the other and to the first rank's main memory. All ranks
    must call; the others get those that are not sharded."""
    found = {}
    for name, x in tensors.items():
        whole = _whole(x)
        if whole is x:
            found[name] = x
        elif rank() == 0:
            found[name] = whole.cpu()
    return found


def as_held(held: dict[str, Tensor], saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """`saved` whole tensors as this rank holds those of `held`: whole, or its own shards."""
    return {name: _as(held.get(name), x) for name, x in saved.items()}


def _as(held: Tensor | None, saved: Tensor) -> Tensor:
    if held is None or not _is_sharded(held):
        return saved
    from torch.distributed.tensor import distribute_tensor

    # Every rank has read the whole tensor, so nothing is sent.
    whole = saved.to(held.device)
    return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
