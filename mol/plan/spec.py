"""A run's specification: all that decides its result, and the identity derived from it."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from mol.base import Frozen, Size, Slug, digest
from mol.bench.config import Bench
from mol.data.config import DataSpec
from mol.model.config import ModelConfig

Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
ScaleName = Literal["smoke", "proxy", "paper"]


class OptimSpec(Frozen):
    """AdamW with warm-up and cosine decay (4.2)."""

    steps: Size
    batch_size: Size  # sequences a step
    lr: float = Field(gt=0, le=1e6)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    warmup_steps: int = Field(ge=0, le=2**40)
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0
    balance_alpha: NonNegativeFloat = 0.05
    pad_targets: Literal["counted", "masked"] = "counted"
    accumulate: Size = 1  # micro-batches a step
    checkpoint_activations: bool = False

    @model_validator(mode="after")
    def _check(self):
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size = {self.batch_size} is no multiple of accumulate")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} must be below steps")
        return self


class EvalSpec(Frozen):
    """When and on how much text a run is evaluated."""

    every: Size  # steps between points of the validation curve
    curve_sequences: Size  # validation sequences of a curve point
    final_sequences: Size | None = None  # at the end, each split; None: all


class TrainSpec(Frozen):
    """One training run with its evaluation."""

    kind: Literal["train"] = "train"
    scale: ScaleName
    condition: Slug
    model: ModelConfig
    data: DataSpec
    seq_len: Size
    optim: OptimSpec
    evaluation: EvalSpec
    seed: Seed
    precision: Literal["fp32", "bf16"] = "fp32"

    @model_validator(mode="after")
    def _check(self):
        if self.model.vocab_size < self.data.vocab_size:
            raise ValueError(
                f"model.vocab_size = {self.model.vocab_size} is below the tokenizer's "
                f"{self.data.vocab_size}"
            )
        layout = self.data.layout
        if layout.kind == "padded" and self.seq_len != layout.chunk - 1:
            raise ValueError(
                f"seq_len = {self.seq_len}: rows of {layout.chunk} tokens (data.layout.chunk) give "
                f"{layout.chunk - 1}"
            )
        return self

    @property
    def run_id(self) -> str:
        return f"{self.condition}-s{self.seed}-{digest(self)}"

    @property
    def tokens(self) -> int:
        """Trained on, those that are read again included."""
        return self.optim.steps * self.optim.batch_size * self.seq_len


class ZeroShotSpec(Frozen):
    """One trained model scored on the tasks of Tables 6 and 14 (Appendix K)."""

    kind: Literal["zeroshot"] = "zeroshot"
    scale: ScaleName
    condition: Slug
    train_run: Slug  # run_id of the model
    tasks: tuple[str, ...]
    limit: Size | None = None  # items a task; None: all
    max_length: Size = 2048
    seed: Seed

    @property
    def run_id(self) -> str:
        return f"zeroshot-{self.condition}-s{self.seed}-{digest(self)}"


class BenchSpec(Frozen):
    """One benchmark program with its arguments (E08, E13)."""

    kind: Literal["bench"] = "bench"
    scale: ScaleName
    condition: Slug  # name of the benchmark
    bench: Bench
    seed: Seed = 0

    @property
    def run_id(self) -> str:
        return f"bench-{self.condition}-{digest(self)}"


RunSpec = Annotated[TrainSpec | ZeroShotSpec | BenchSpec, Field(discriminator="kind")]
