"""Arguments of the benchmark programs (no torch here). Models are given as configurations."""

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from mol.base import Frozen
from mol.model.config import Count, ModelConfig

Device = Literal["auto", "cpu", "cuda"]
BackEnd = Literal["cudnn", "flash", "efficient", "flash_attn"]  # of `mol.ops.attention_by`
T = TypeVar("T")


def _each_once(values: tuple) -> tuple:
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice; leave one")
    return values


# What is timed one after the other: each figure must have a label of its own.
Several = Annotated[tuple[T, ...], Field(min_length=1), AfterValidator(_each_once)]


class Timed(Frozen):
    """Common to every timing: warm-up calls, then `repeats` timed ones, median and spread."""

    device: Device = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    warmup: int = Field(2, ge=0, le=2**24)
    repeats: Count = 5


class PrefillBench(Timed):
    """Table 7: prompt tokens a second at batch 1, model by model and length by length.

    Models with routed blocks are timed once by each of `paths`: all blocks in one pass, block by
    block, or blocks as further heads of one call (5.6). `run_as`: `paper` is eager, with
    FlashAttention-2, and gives the mean; `fastest` is compiled or captured as a CUDA graph, with
    torch's choice of attention, and gives the median. `attention`: back ends to time one after
    the other in place of that choice (`mol.ops.attention_by`).
    """

    program: Literal["prefill"] = "prefill"
    models: dict[str, ModelConfig]
    lengths: Several[Count]
    paths: Several[Literal["one_pass", "loop", "batched"]] = ("one_pass",)
    run_as: Literal["paper", "fastest"] = "fastest"
    # Left out where empty, so that a run's identity is that of before the choice.
    attention: Annotated[tuple[BackEnd, ...], AfterValidator(_each_once)] = Field(
        (), exclude_if=lambda named: not named
    )


class DecodeBench(Timed):
    """Table 12 and Appendix H: milliseconds a token with a cache of a given context, and
    without a cache at the shortest one (the uplift of the cache)."""

    program: Literal["decode"] = "decode"
    models: dict[str, ModelConfig]
    contexts: Several[Count]
    batch_size: Count = 1


class AttentionBench(Timed):
    """Table 10: forward + backward of an isolated block, softmax against Gated DeltaNet."""

    program: Literal["attention"] = "attention"
    d_model: Count
    n_heads: Count
    d_ff: Count
    batch_size: Count
    lengths: Several[Count]


class DispatchCase(Frozen):
    top_k: Count
    n_blocks: Count

    @model_validator(mode="after")
    def _check(self):
        if self.top_k > self.n_blocks:
            raise ValueError(f"top_k = {self.top_k} exceeds n_blocks = {self.n_blocks}")
        return self


class DispatchBench(Timed):
    """2.3: forward time of one softmax split stage, dense restricted against sparse; with
    `n_layers` that of a whole model of such stages with its head. Run eagerly, through
    torch.compile, or as a CUDA graph."""

    program: Literal["dispatch"] = "dispatch"
    d_model: Count
    d_thin: Count
    n_heads: Count
    d_ff: Count
    cases: Several[DispatchCase]
    seq_len: Count
    batch_size: Count
    n_layers: Count | None = None
    vocab_size: Count = 32_000
    run_as: Literal["eager", "compiled", "graph"] = "eager"

    @model_validator(mode="after")
    def _check(self):
        if self.run_as == "compiled" and self.dtype != "bf16":
            raise ValueError("compiled needs dtype = bf16, where torch traces its grouped product")
        return self


class LogitDiffBench(Frozen):
    """2.3: largest logit difference between sparse dispatch and dense restricted attention."""

    program: Literal["logit_diff"] = "logit_diff"
    device: Device = "auto"
    model: ModelConfig
    seq_len: Count
    batch_size: Count = 1


class ShardingBench(Frozen):
    """Appendix F: parameters and traffic of each of `devices` on which routed blocks are placed,
    counted; memory and time of a stage on each number of `ranks`, processes on the CPU, measured
    with sequences of `seq_len` tokens (`mol.bench.placed`)."""

    program: Literal["sharding"] = "sharding"
    model: ModelConfig
    devices: int = Field(3, ge=2, le=1024)
    ranks: tuple[Annotated[int, Field(ge=2, le=6)], ...] = ()
    seq_len: Count = 256

    @model_validator(mode="after")
    def _check(self):
        layer = self.model.layer
        routed = layer.n_routed if layer.kind == "split" and layer.chooses else 0
        alike = routed and (layer.coverage == "full" or layer.top_k == routed)
        if self.ranks and (alike or routed < max(self.ranks)):
            raise ValueError(f"ranks = {self.ranks}: the model has not so many routed blocks")
        return self


class TrainStepCase(Frozen):
    """One model and the shapes of its step: `batch_size` sequences in `accumulate` parts."""

    model: ModelConfig
    seq_len: Count
    batch_size: Count
    accumulate: Count = 1
    checkpoint_activations: bool = False

    @model_validator(mode="after")
    def _check(self):
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size = {self.batch_size} is no multiple of accumulate")
        return self


class TrainStepBench(Timed):
    """The optimizer step of `mol train`, case by case (not a row of the paper). `graph`: replayed
    on a GPU, as training does it; `eager`: launched kernel by kernel."""

    program: Literal["train_step"] = "train_step"
    cases: dict[str, TrainStepCase]
    run_as: Literal["graph", "eager"] = "graph"


Bench = Annotated[
    PrefillBench
    | DecodeBench
    | AttentionBench
    | DispatchBench
    | LogitDiffBench
    | ShardingBench
    | TrainStepBench,
    Field(discriminator="program"),
]
