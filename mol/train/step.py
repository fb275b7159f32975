"""One optimizer step; on a GPU it is recorded once as a CUDA graph and then replayed.

Shapes: A micro-batches, B sequences of each, T tokens.

    step = TrainStep(model, optim, seq_len, device, bf16=True)
    step(batches, lr)            # A batches of the loader; returns before the GPU is done
    loss, balance, norm = step.figures()    # waits; raises FloatingPointError if it went wrong

Nothing of a step is read on the host: a step takes as long as its kernels, and the host runs ahead.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from mol.data.loader import Sequence
from mol.model.transformer import LanguageModel
from mol.ops.collectives import world
from mol.ops.cross_entropy import weighted_cross_entropy
from mol.ops.graph import recording
from mol.plan.spec import OptimSpec
from mol.train.copies import Copies
from mol.train.distributed import clip_gradients, held_back, mean_of_ranks, spread
from mol.train.guard import Guard
from mol.train.optimizer import AdamW

# Steps before the recording, in which kernels are compiled and tuned; steps like all others.
EAGER_STEPS = 3


class TrainStep:
    """Forward, loss, backward, clipping and AdamW update (4.2), with what they change.

    The steps of one process on a GPU are replayed from the fourth on, all with the shapes of the
    first. A step whose loss fails (`Guard`) changes nothing, nor does any after it.
    """

    def __init__(
        self,
        model: LanguageModel,
        optim: OptimSpec,
        seq_len: int,
        device: torch.device,
        bf16: bool,
        replayed: bool = True,
    ):
        self.model, self.optim, self.device, self.bf16 = model, optim, device, bf16
        model.checkpoint_activations = optim.checkpoint_activations
        self.net = spread(model, device)
        self.optimizer = AdamW(model, optim)
        # Several ranks send a gradient as soon as it is there, and hold shards; copies give all of
        # them at the end.
        self.copies = Copies(model) if bf16 and world() == 1 else None
        self.guard = Guard(device)
        # Of a rank, on the average.
        self.targets = optim.batch_size // optim.accumulate * seq_len / world()
        self.lr = torch.zeros((), device=device)
        self.outcome_3 = torch.zeros(3, device=device)  # loss, balance, gradient norm
        self.replayed = replayed and device.type == "cuda" and world() == 1
        self.inputs: _Inputs | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.aside: torch.cuda.Stream | None = None
        self.done = 0

    def __call__(self, batches: list[Sequence], lr: float) -> None:
        """One step at learning rate `lr` on `optim.accumulate` batches from the host."""
        if self.inputs is None:
            self.inputs = _Inputs(batches, self.device)
        self.inputs.load(batches)
        self.lr.fill_(lr)
        if self.graph is None and self.replayed and self.done == EAGER_STEPS:
            self._record()
        if self.graph is not None:
            self.graph.replay()
        elif self.replayed:
            self._update_aside()
        else:
            self._update()
        self.done += 1

    @property
    def prepares(self) -> bool:
        """Whether the last step was one of those that compile kernels or record."""
        return self.replayed and self.done <= EAGER_STEPS + 1

    def figures(self) -> tuple[float, float, float]:
        """Loss in nats a target, balance loss and gradient norm of the last step. Raises
        FloatingPointError if a step since the last call failed, saying which and how."""
        self.guard.check()
        return tuple(self.outcome_3.tolist())

    def _update(self) -> None:
        optim = self.optim
        self.model.zero_grad(set_to_none=True)
        loss_sum, balance_sum = 0.0, 0.0
        for micro, batch in enumerate(self.inputs.batches(), 1):
            with self.copies.in_place() if self.copies else nullcontext():
                with (
                    held_back(self.net, micro == optim.accumulate),
                    torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16),
                ):
                    loss, balance = self._losses(*batch)
                ((loss + optim.balance_alpha * balance) / optim.accumulate).backward()
            loss_sum += loss.detach() / optim.accumulate
            balance_sum += balance.detach() / optim.accumulate
        norm = clip_gradients(self.model, optim.clip)
        loss = mean_of_ranks(loss_sum)
        self.optimizer.step(self.lr, self.guard.judge(loss, norm))
        self.outcome_3.copy_(torch.stack([loss.float(), balance_sum.float(), norm.float()]))

    def _losses(self, inputs: Tensor, targets: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over the targets that count, and the balance loss."""
        output = self.net(inputs)
        # Divided by what a rank has on the average, so that the mean over ranks of unlike
        # shares is the batch's mean.
        if self.optim.pad_targets == "masked":
            count = mean_of_ranks(real.sum().float()).clamp(min=1 / world())
            share_N = real.flatten() / count
        else:
            share_N = torch.full_like(targets, 1 / self.targets, dtype=torch.float32).flatten()
        loss = weighted_cross_entropy(
            output.hidden.flatten(0, 1), self.model.embedding.weight, targets.flatten(), share_N
        )
        return loss, output.balance

    def _update_aside(self) -> None:
        """An eager step on another stream, as recording wants it; always the same, as each stream
        keeps memory of its own."""
        self.aside = self.aside or torch.cuda.Stream(self.device)
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            self._update()
        torch.cuda.current_stream().wait_stream(self.aside)

    def _record(self) -> None:
        # The eager steps' gradients would stay beside the recorded ones.
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph):
            self._update()


class _Inputs:
    """A step's batches on the device, at fixed addresses [A, B, T]."""

    AHEAD = 2  # steps that the host may prepare before the GPU has done the first of them

    def __init__(self, batches: list[Sequence], device: torch.device):
        like = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]
        self.held = [tensor.to(device) for tensor in like]
        self.pinned = None
        if device.type == "cuda":
            self.pinned = [
                ([tensor.pin_memory() for tensor in like], torch.cuda.Event())
                for _ in range(self.AHEAD)
            ]
        self.turn = 0

    def load(self, batches: list[Sequence]) -> None:
        stacked = zip(self.held, zip(*batches, strict=True), strict=True)
        if self.pinned is None:
            for held, tensors in stacked:
                held.copy_(torch.stack(tensors))
            return
        pinned, copied = self.pinned[self.turn]
        self.turn = (self.turn + 1) % self.AHEAD
        copied.synchronize()  # what these pages held has left
        for (held, tensors), page in zip(stacked, pinned, strict=True):
            torch.stack(tensors, out=page)
            held.copy_(page, non_blocking=True)
        copied.record()

    def batches(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(tensor.unbind(0) for tensor in self.held), strict=True))
