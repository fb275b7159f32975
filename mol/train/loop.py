"""The training loop: resumable at any step, bit-identical on a CPU for a given thread count."""

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mol.base import UserError, reason_of, write_atomic
from mol.data.loader import TokenBatches, eval_sequences
from mol.evaluate.perplexity import score, scoring_batch
from mol.model.transformer import LanguageModel
from mol.ops.collectives import rank, world
from mol.ops.cross_entropy import linear_cross_entropy
from mol.plan.hashes import source_hash
from mol.plan.spec import TrainSpec
from mol.train.checkpoint import STATE, load_state, save_state
from mol.train.distributed import (
    as_first,
    as_held,
    clip_gradients,
    gathered,
    held_back,
    mean_of_ranks,
    spread,
)
from mol.train.optimizer import AdamW
from mol.train.schedule import lr_at

CHECKPOINT_SECONDS = 600.0  # between checkpoints when no step count is asked for
LOG_POINTS = 200  # training-curve points a run keeps


@dataclass
class Progress:
    """What a progress display needs after each step."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float


@dataclass
class Trained:
    """A finished (or stopped) run: model, curve rows (step, tokens, name, value), throughput."""

    model: LanguageModel
    curve: list[tuple[int, int, str, float]]
    steps_done: int
    train_seconds: float
    epochs: float


class Trainer:
    """Owns everything that changes from step to step, so that saving it saves the run."""

    def __init__(self, spec: TrainSpec, corpus: Path, device: torch.device):
        torch.manual_seed(spec.seed)
        self.spec, self.corpus, self.device = spec, corpus, device
        self.code_sha256 = source_hash("train")
        self.bf16 = spec.precision == "bf16"
        with torch.device(device):
            self.model = LanguageModel(spec.model)
        self.model.checkpoint_activations = spec.optim.checkpoint_activations
        self.net = spread(self.model, device)
        self.optimizer = AdamW(self.model, spec.optim)
        micro_batch = spec.optim.batch_size // spec.optim.accumulate
        self.rank_targets = micro_batch * spec.seq_len / world()  # of a rank, on the average
        self.batches = TokenBatches(
            corpus, "train", spec.seq_len, micro_batch, spec.seed, share=(rank(), world())
        )
        self.step = 0
        self.seconds = 0.0
        self.curve: list[tuple[int, int, str, float]] = []

    @property
    def tokens(self) -> int:
        return self.step * self.spec.optim.batch_size * self.spec.seq_len

    def log(self, name: str, value: float) -> None:
        self.curve.append((self.step, self.tokens, name, float(value)))

    def train_step(self) -> float:
        """One optimizer step; returns the mean training loss in nats a target."""
        optim = self.spec.optim
        lr = lr_at(self.step, optim)
        loss_sum, balance_sum = 0.0, 0.0
        for micro in range(1, optim.accumulate + 1):
            inputs, targets, real = (t.to(self.device) for t in self.batches.next())
            with (
                held_back(self.net, micro == optim.accumulate),
                torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16),
            ):
                output = self.net(inputs)
                hidden_ND = output.hidden.flatten(0, 1)
                nll_N = linear_cross_entropy(
                    hidden_ND, self.model.embedding.weight, targets.flatten()
                )
            # Divided by what a rank has on the average, so that the mean over ranks of unlike
            # shares is the batch's mean.
            if optim.pad_targets == "masked":
                count = mean_of_ranks(real.sum().float())
                loss = (nll_N * real.flatten()).sum() / count.clamp(min=1 / world())
            else:
                loss = nll_N.sum() / self.rank_targets
            objective = loss + optim.balance_alpha * output.balance
            (objective / optim.accumulate).backward()
            loss_sum += loss.detach() / optim.accumulate
            balance_sum += output.balance.detach() / optim.accumulate
        norm = clip_gradients(self.model, optim.clip)
        loss_value = float(mean_of_ranks(loss_sum))
        if not math.isfinite(loss_value) or not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"step {self.step + 1}: loss {loss_value}, gradient norm {float(norm)}"
            )
        self.optimizer.step(lr)
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % max(1, optim.steps // LOG_POINTS) == 0 or self.step == optim.steps:
            self.log("train_nll", loss_value)
            self.log("balance", float(balance_sum))
            self.log("lr", lr)
            self.log("grad_norm", float(norm))
        return loss_value

    def evaluate(self) -> None:
        """Add one point to the validation curve."""
        plan = self.spec.evaluation
        sequences = eval_sequences(
            self.corpus, "validation", self.spec.seq_len, plan.curve_sequences
        )
        tally, _ = score(
            self.model, sequences, scoring_batch(self.spec.seq_len), self.device, self.bf16
        )
        self.log("validation_nll", tally.nll_real / tally.n_real)
        if self.spec.data.layout.kind == "padded":
            self.log("validation_nll_pad", tally.nll_all / tally.n_all)

    def state(self) -> dict:
        return {
            "run_id": self.spec.run_id,
            "code_sha256": self.code_sha256,
            "step": self.step,
            "seconds": self.seconds,
            "model": gathered(self.model.state_dict()),
            "optimizer": {k: gathered(t) for k, t in self.optimizer.state_dict().items()},
            "batches": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "curve": self.curve,
        }

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(as_held(self.model.state_dict(), state["model"]))
        held = self.optimizer.state_dict()
        self.optimizer.load_state_dict({k: as_held(held[k], t) for k, t in state["optimizer"].items()})
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["rng"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve = [tuple(row) for row in state["curve"]]


def train(
    spec: TrainSpec,
    corpus: Path,
    out: Path,
    device: torch.device,
    checkpoint_every: int | None = None,
    stop_after: int | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> Trained:
    """Train `spec` on the prepared corpus, resuming from `out/state.pt` where there is one.

    A checkpoint is written every `checkpoint_every` steps (default: every 10 minutes) and when
    `stop_after` steps end the call early. A loss or gradient that is not finite raises
    UserError and leaves the last good checkpoint in place.
    """
    trainer = Trainer(spec, corpus, device)
    saved = load_state(out, spec.run_id, trainer.code_sha256)
    if saved:
        try:
            trainer.restore(saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:  # of another layout
            reason = f"does not fit this run ({reason_of(error)[:200]})"
            raise UserError(f"{out / STATE}: {reason}; delete it to restart") from None
    else:
        trainer.evaluate()
    last = min(spec.optim.steps, stop_after or spec.optim.steps)
    checkpointed = time.monotonic()
    while trainer.step < last:
        started = time.perf_counter()
        try:
            loss = trainer.train_step()
        except FloatingPointError as error:
            raise UserError(
                f"{spec.run_id}: {error}; stopped. The last good checkpoint is "
                f"{out / STATE if (out / STATE).exists() else 'the start'}; lower optim.lr"
            ) from None
        trainer.seconds += time.perf_counter() - started
        if trainer.step % spec.evaluation.every == 0 or trainer.step == spec.optim.steps:
            trainer.evaluate()
        if on_step:
            rate = trainer.tokens / trainer.seconds
            on_step(Progress(trainer.step, spec.optim.steps, loss, rate))
        due = (
            trainer.step % checkpoint_every == 0
            if checkpoint_every
            else time.monotonic() - checkpointed > CHECKPOINT_SECONDS
        )
        if trainer.step < spec.optim.steps and (due or trainer.step == last):
            save_state(out, trainer.state())
            checkpointed = time.monotonic()
    return Trained(
        trainer.model, trainer.curve, trainer.step, trainer.seconds, trainer.batches.epochs
    )


def write_curve(path: Path, rows: list[tuple[int, int, str, float]]) -> None:
    """Write curve rows to parquet, whole or not at all."""
    names = ("step", "tokens", "name", "value")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    types = {"step": pa.int64(), "tokens": pa.int64(), "name": pa.string(), "value": pa.float64()}
    table = pa.table({n: pa.array(columns[n], types[n]) for n in names})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    write_atomic(path, buffer.getvalue())
