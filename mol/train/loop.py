"""The training loop: resumable at any step, bit-identical on a CPU for a given thread count."""

import gc
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mol.base import UserError, reason_of, write_atomic
from mol.data.loader import TokenBatches, eval_sequences
from mol.data.read_ahead import ReadAhead
from mol.evaluate.perplexity import score, scoring_batch
from mol.model.transformer import LanguageModel
from mol.ops.collectives import rank, world
from mol.plan.hashes import source_hash
from mol.plan.spec import TrainSpec
from mol.train.checkpoint import STATE, load_state, save_state
from mol.train.distributed import as_first, as_held, gathered, put_back
from mol.train.environment import hardware
from mol.train.schedule import lr_at
from mol.train.step import TrainStep

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
    """A finished (or stopped) run: model, curve rows (step, tokens, name, value), seconds of all
    steps, the rate of those that count for it (`Trainer.count`), and the other machines that made
    some of the steps."""

    model: LanguageModel
    curve: list[tuple[int, int, str, float]]
    steps_done: int
    train_seconds: float
    steps_per_s: float
    epochs: float
    elsewhere: list[str]


class Trainer:
    """Owns everything that changes from step to step, so that saving it saves the run."""

    def __init__(self, spec: TrainSpec, corpus: Path, device: torch.device):
        torch.manual_seed(spec.seed)
        self.spec, self.corpus, self.device = spec, corpus, device
        self.code_sha256 = source_hash("train")
        self.bf16 = spec.precision == "bf16"
        with torch.device(device):
            self.model = LanguageModel(spec.model)
        self.update = TrainStep(self.model, spec.optim, spec.seq_len, device, self.bf16)
        micro_batch = spec.optim.batch_size // spec.optim.accumulate
        self.batches = ReadAhead(
            TokenBatches(
                corpus, "train", spec.seq_len, micro_batch, spec.seed, share=(rank(), world())
            )
        )
        self.loss = 0.0  # of the last step that was read
        self.step = 0
        self.seconds = 0.0
        machine = hardware(device)
        self.machine = f"{world()} x {machine.name}, threads: {machine.threads}"
        self.elsewhere: list[str] = []  # other machines that made some of the steps
        self.steady_steps, self.steady_seconds = 0, 0.0
        self.curve: list[tuple[int, int, str, float]] = []

    @property
    def tokens(self) -> int:
        return self.step * self.spec.optim.batch_size * self.spec.seq_len

    def log(self, name: str, value: float) -> None:
        self.curve.append((self.step, self.tokens, name, float(value)))

    def train_step(self) -> float:
        """One optimizer step. Returns the mean training loss in nats a target of the last step that
        was read: of this one on a CPU, of the last logged or checked one on a GPU, which is not
        waited for. Raises FloatingPointError when a step read now or before went wrong."""
        optim = self.spec.optim
        lr = lr_at(self.step, optim)
        self.update([self.batches.next() for _ in range(optim.accumulate)], lr)
        self.step += 1
        logged = _reached(self.step, optim.steps, max(1, optim.steps // LOG_POINTS))
        if logged or self.device.type == "cpu":
            self.loss, balance, norm = self.update.figures()
        if logged:
            self.log("train_nll", self.loss)
            self.log("balance", balance)
            self.log("lr", lr)
            self.log("grad_norm", norm)
        return self.loss

    def count(self, seconds: float) -> None:
        """Add a step's time. The rate leaves out those in which a process that replays its steps
        compiles kernels and records: seconds each, however short the run."""
        self.seconds += seconds
        if not self.update.prepares:
            self.steady_steps += 1
            self.steady_seconds += seconds

    @property
    def steps_per_s(self) -> float:
        if self.steady_steps:
            return self.steady_steps / self.steady_seconds
        return self.step / self.seconds

    def evaluate(self) -> None:
        """Add one point to the validation curve."""
        plan = self.spec.evaluation
        sequences = eval_sequences(
            self.corpus, "validation", self.spec.seq_len, plan.curve_sequences
        )
        at_once = scoring_batch(self.spec.seq_len, self.device)
        tally, _ = score(self.model, sequences, at_once, self.device, self.bf16)
        put_back(self.model)
        self.log("validation_nll", tally.nll_real / tally.n_real)
        if self.spec.data.layout.kind == "padded":
            self.log("validation_nll_pad", tally.nll_all / tally.n_all)

    def state(self) -> dict:
        return {
            "run_id": self.spec.run_id,
            "code_sha256": self.code_sha256,
            "step": self.step,
            "seconds": self.seconds,
            "machines": [*self.elsewhere, self.machine],
            "steady": (self.steady_steps, self.steady_seconds),
            "model": gathered(self.model.state_dict()),
            "optimizer": {k: gathered(t) for k, t in self.update.optimizer.state_dict().items()},
            "guard": self.update.guard.state_dict(),
            "batches": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "curve": self.curve,
        }

    def restore(self, state: dict) -> None:
        """Go on where `state` was taken. A speed is of one machine, so that of another is left
        behind. Raises what torch does, or ValueError, for a state of another layout."""
        taken = state["batches"]["position"]
        if taken != state["step"] * self.spec.optim.batch_size:
            raise ValueError(f"{taken} sequences in {state['step']} steps")
        self.model.load_state_dict(as_held(self.model.state_dict(), state["model"]))
        optimizer = self.update.optimizer
        held = optimizer.state_dict()
        optimizer.load_state_dict({k: as_held(held[k], t) for k, t in state["optimizer"].items()})
        self.update.guard.load_state_dict(state["guard"])
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["rng"])
        self.step, self.seconds = state["step"], state["seconds"]
        *_, last = machines = state["machines"]
        self.elsewhere = [name for name in dict.fromkeys(machines) if name != self.machine]
        if last == self.machine:
            self.steady_steps, self.steady_seconds = state["steady"]
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
    `stop_after` steps end the call early. A loss that spikes, and a loss or gradient that is not
    finite (`mol.train.guard`), raises UserError and leaves the last good checkpoint in place.
    """
    trainer = Trainer(spec, corpus, device)
    saved = load_state(out, spec.run_id, trainer.code_sha256)
    begin = saved["step"] if saved else 0
    if as_first(begin, device) != begin:
        raise UserError(
            f"{out}: process {rank()} finds step {begin}, the first process another; all of them "
            "need the same results folder"
        )
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
    with _garbage_frozen():
        while trainer.step < last:
            started = time.perf_counter()
            evaluates = _reached(trainer.step + 1, spec.optim.steps, spec.evaluation.every)
            due = trainer.step + 1 == last or (
                (trainer.step + 1) % checkpoint_every == 0
                if checkpoint_every
                else as_first(time.monotonic() - checkpointed, device) > CHECKPOINT_SECONDS
            )
            try:
                loss = trainer.train_step()
                # A state that went wrong is neither scored nor saved.
                if evaluates or due or trainer.update.prepares:
                    trainer.update.figures()
            except FloatingPointError as error:
                trainer.batches.close()
                raise UserError(
                    f"{spec.run_id}: {error}; stopped. The last good checkpoint is "
                    f"{out / STATE if (out / STATE).exists() else 'the start'}; lower optim.lr"
                ) from None
            trainer.count(time.perf_counter() - started)
            if evaluates:
                trainer.evaluate()
            if on_step:
                rate = trainer.steps_per_s * trainer.tokens / trainer.step
                on_step(Progress(trainer.step, spec.optim.steps, loss, rate))
            if due and trainer.step < spec.optim.steps:
                state = trainer.state()
                if rank() == 0:
                    save_state(out, state)
                checkpointed = time.monotonic()
    trainer.batches.close()
    return Trained(
        trainer.model,
        trainer.curve,
        trainer.step,
        trainer.seconds,
        trainer.steps_per_s,
        trainer.batches.epochs,
        trainer.elsewhere,
    )


def _reached(step: int, steps: int, every: int) -> bool:
    return step % every == 0 or step == steps


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Inside, the collector leaves what there is alone: walking through a model takes as long as
    launching a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def write_curve(path: Path, rows: list[tuple[int, int, str, float]]) -> None:
    """Write curve rows to parquet, whole or not at all."""
    names = ("step", "tokens", "name", "value")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    types = {"step": pa.int64(), "tokens": pa.int64(), "name": pa.string(), "value": pa.float64()}
    table = pa.table({n: pa.array(columns[n], types[n]) for n in names})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    write_atomic(path, buffer.getvalue())
