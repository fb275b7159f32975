"""What the processes that torchrun started compute together; one process passes through unchanged.

Gradients follow one convention, that of DDP and FSDP: the objective is the mean over ranks of what
each rank computes, so a rank's gradient counts 1 / W.

Shape suffixes: N rows, M any width, E blocks, W ranks.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def world() -> int:
    """Ranks that compute together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def of_all_ranks(value: Any) -> list[Any]:
    """Every rank's small value, in the order of ranks. All ranks must call."""
    if world() == 1:
        return [value]
    every = [None] * world()
    dist.all_gather_object(every, value)
    return every


def mean_rows(x_NM: Tensor) -> Tensor:
    """Mean of the rows of all ranks, [M], the same on every rank; ranks may hold unlike numbers.

    Without gradients it is the mean of this rank's own rows: evaluation does not train on it, and
    ranks need not evaluate in step.
    """
    if world() == 1 or not torch.is_grad_enabled():
        return x_NM.mean(0)
    count = x_NM.new_full((1,), x_NM.shape[0])
    sums = _SharedSum.apply(torch.cat([x_NM.sum(0), count]))
    return sums[:-1] / sums[-1]


def _summed(x: Tensor) -> Tensor:
    """Sum over ranks, in a tensor of its own."""
    total = x.clone()
    dist.all_reduce(total)
    return total


class _SharedSum(torch.autograd.Function):
    """Sum over ranks. Every rank's objective holds the same function of it, so the gradients that
    arrive are equal: their sum is W times one of them, and costs no message."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * world()


def exchange(x_NM: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Rows to other ranks and from them: the first `sent[0]` go to rank 0, the next `sent[1]` to
    rank 1; what comes back is in the order of ranks. The gradient travels the same way back."""
    return _Exchange.apply(x_NM, sent, received)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NM: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = received, sent
        return all_to_all(x_NM, sent, received)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all(grad, *ctx.splits), None, None


def all_to_all(x_NM: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """`exchange` without a gradient, of any type of number."""
    y = x_NM.new_empty(sum(received), *x_NM.shape[1:])
    dist.all_to_all_single(y, x_NM.contiguous(), received, sent)
    return y


class enter_all(torch.autograd.Function):  # noqa: N801 (called like a function)
    """Tensors that every rank holds alike, on their way into what each rank computes a part of:
    the parts of their gradients are summed, all in one message."""

    @staticmethod
    def forward(ctx, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([grad.reshape(-1).float() for grad in grads])
        dist.all_reduce(flat)
        parts = flat.split([grad.numel() for grad in grads])
        return tuple(p.view_as(g).to(g.dtype) for p, g in zip(parts, grads, strict=True))


class sum_parts(torch.autograd.Function):  # noqa: N801
    """Sum over ranks of each rank's part; every rank goes on alike, so the gradient is one's own:
    together with `enter_all`, Megatron's pair of operators."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Traffic(TorchDispatchMode):
    """Inside, counts this rank's collectives: `calls` by operation and `sent`, the bytes that leave
    it for others (all-reduce, reduce-scatter and all-gather as rings, all-to-all as its splits
    say). On CPUs only: on a GPU the backward pass has a thread of its own."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("c10d.").removesuffix(".default")
        if str(func).startswith("c10d.") and name in _SENT:
            kind, count = _SENT[name]
            self.calls[kind] += 1
            self.sent[kind] += count(args)
        return func(*args, **(kwargs or {}))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _reduced(args) -> int:
    return sum(2 * (world() - 1) * _bytes(x) // world() for x in args[0])


def _sent_rows(args) -> int:
    """all-to-all: arguments are output, input, group, output splits, input splits."""
    x, splits = args[1], args[4]
    per_row = _bytes(x) // max(1, x.shape[0])
    return per_row * (sum(splits) - splits[rank()])


_SENT = {
    "allreduce_": ("all_reduce", _reduced),
    "allgather_": ("all_gather", lambda args: (world() - 1) * _bytes(args[1][0])),
    "_allgather_base_": ("all_gather", lambda args: (world() - 1) * _bytes(args[1])),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: (world() - 1) * _bytes(args[0])),
    "alltoall_base_": ("all_to_all", _sent_rows),
}
