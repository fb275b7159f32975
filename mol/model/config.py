"""Architectures as data: one frozen configuration per kind of layer (no torch here).

Names: D = d_model, d = d_thin, N = blocks or experts in all, S = shared blocks, k = routed
blocks a token activates. Sections and equations are those of arXiv 2605.09516.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from mol.base import Frozen

# A width, or a number of experts, blocks or tokens: a larger one fits no machine.
Count = Annotated[int, Field(gt=0, le=2**24)]
Attention = Literal["softmax", "deltanet"]


def _divides(heads: int, width: int, what: str) -> None:
    if width % heads:
        raise ValueError(f"{what} = {width} is not a multiple of n_heads = {heads}")
    if (width // heads) % 2:
        raise ValueError(
            f"{what} / n_heads = {width // heads} is odd; RoPE needs an even head width"
        )


class DenseLayer(Frozen):
    """Pre-norm transformer block at full width (4.3)."""

    kind: Literal["dense"] = "dense"
    attention: Attention = "softmax"
    n_heads: Count
    d_ff: Count


class Rank1FFN(Frozen):
    """Mixture of rank-1 experts, y = sum_i w_i gelu(u_i . x) v_i (Appendix A)."""

    n_experts: Count
    top_k: Count
    routing_dim: Count
    tau: PositiveFloat = 15.0
    # Two routing vectors per expert follow from the counts; how they combine is not known.
    cosine: Literal["mean", "first"] = "mean"
    se_hidden: Count | None = None  # Appendix C: K -> se_hidden -> K gate, 4 in the paper

    @model_validator(mode="after")
    def _check(self):
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k = {self.top_k} exceeds n_experts = {self.n_experts}")
        return self


class CTMoELayer(Frozen):
    """Full-width softmax attention with a rank-1 mixture for FFN (Table 8, CT-MoE)."""

    kind: Literal["ct_moe"] = "ct_moe"
    n_heads: Count
    ffn: Rank1FFN


class MoEFFNLayer(Frozen):
    """Full-width softmax attention with top-k routed FFN experts (Table 3, MoE-FFN 3of5)."""

    kind: Literal["moe_ffn"] = "moe_ffn"
    n_heads: Count
    n_experts: Count
    top_k: Count
    d_ff: Count


class HighRankMoELayer(Frozen):
    """Biased experts of a given rank routed by cosine to anchors (Table 8, reference)."""

    kind: Literal["high_rank_moe"] = "high_rank_moe"
    n_heads: Count
    n_experts: Count
    top_k: Count
    rank: Count


class SplitLayer(Frozen):
    """Split stage of thin blocks (Eq. 1 and 2), written S+KofN in 3.2.

    The first `n_shared` of `n_blocks` see every token and use softmax; `attention` is the others'.
    Eq. 2 leaves three things open, the router a fourth; each is an option recorded with every run:
    `weights_over`, `divide_by_k`, `shared_weight` and `router`.
    """

    kind: Literal["split"] = "split"
    d_thin: Count
    n_heads: Count
    n_blocks: Count
    n_shared: int = Field(0, ge=0, le=2**24)
    top_k: Count
    coverage: Literal["full", "routed"] = "routed"
    attention: Attention = "softmax"  # of the routed blocks
    d_ff: Count | None = None  # dense FFN inside a block ...
    rank1: Rank1FFN | None = None  # ... or a rank-1 mixture
    # none: uniform composition, all active; bias, every_block: other readings of the linear one
    router: Literal["linear", "bias", "every_block", "none"] = "linear"
    weights_over: Literal["selected", "all"] = "selected"
    divide_by_k: bool = True
    shared_weight: Literal["in_mean", "unit"] = "in_mean"

    @property
    def n_routed(self) -> int:
        return self.n_blocks - self.n_shared

    @property
    def chooses(self) -> bool:
        """Whether a router weighs the routed blocks."""
        return self.router != "none"

    @model_validator(mode="after")
    def _check(self):
        _divides(self.n_heads, self.d_thin, "d_thin")
        if self.n_shared >= self.n_blocks:
            raise ValueError(
                f"n_shared = {self.n_shared} leaves no routed block of {self.n_blocks}"
            )
        if self.top_k > self.n_routed:
            raise ValueError(f"top_k = {self.top_k} exceeds the {self.n_routed} routed blocks")
        if (self.d_ff is None) == (self.rank1 is None):
            raise ValueError("give exactly one of d_ff and rank1")
        if self.router == "every_block" and not self.n_shared:
            raise ValueError("router = every_block needs shared blocks; without any it is linear")
        if self.router == "none" and self.top_k != self.n_routed:
            raise ValueError("router = none activates every routed block: set top_k to all of them")
        return self


Layer = Annotated[
    DenseLayer | CTMoELayer | MoEFFNLayer | HighRankMoELayer | SplitLayer,
    Field(discriminator="kind"),
]


class ModelConfig(Frozen):
    """A decoder-only language model with tied embeddings: `n_layers` equal layers, or with
    `anchor` layers (full width) at the indices in `anchor_at` (Table 9, split_mid6)."""

    vocab_size: Count
    d_model: Count
    n_layers: int = Field(gt=0, le=1000)
    layer: Layer
    anchor: Layer | None = None
    anchor_at: tuple[int, ...] = ()
    norm: Literal["rms", "layer"] = "rms"
    rope_base: PositiveFloat = 10_000.0
    init_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _check(self):
        for layer in filter(None, (self.layer, self.anchor)):
            if layer.kind != "split":
                _divides(layer.n_heads, self.d_model, "d_model")
        if bool(self.anchor) != bool(self.anchor_at):
            raise ValueError("anchor and anchor_at come together")
        if any(not 0 <= i < self.n_layers for i in self.anchor_at):
            raise ValueError(f"anchor_at = {self.anchor_at} lies outside 0..{self.n_layers - 1}")
        return self

    def layers(self) -> list[Layer]:
        """The layer configuration at each depth, `n_layers` of them."""
        return [self.anchor if i in self.anchor_at else self.layer for i in range(self.n_layers)]
