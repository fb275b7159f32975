"""Model FLOP utilization: the arithmetic that a model calls for against what a GPU could do.

MFU = (6 N_active + 6 A T) x token/s / peak

N_active: weights that a token uses, the tied head among them and its lookup not (it multiplies
nothing). A: summed over layers, the widths of the softmax attentions that a token takes part in;
L d for a dense model of L layers of width d. A token sees T / 2 positions on the average, twice
(scores, values), at 2 operations each and as many twice over in the backward pass: 6 A T. Of a
sparse stage's blocks each sees only its own tokens, k/E of them where E blocks share evenly; the
recurrence of DeltaNet does not grow with T and is left out, as is all that is computed again or
for blocks whose weight is zero.
"""

from typing import NamedTuple

from mol.model.config import Layer, ModelConfig
from mol.model.counts import active_parameters

# bf16 matrix products with fp32 sums, dense, by the makers' data sheets, for the names that the
# driver gives. A GPU that is not here gets no MFU: a guessed peak would make one up.
PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


class FlopCount(NamedTuple):
    """What training on one token takes, forward and backward."""

    weights: int  # N_active
    attention: float  # A
    length: int  # T

    @property
    def total(self) -> float:
        return 6 * self.weights + 6 * self.attention * self.length

    def __str__(self) -> str:
        return f"6 x {self.weights:,} + 6 x {self.attention:,g} x {self.length:,}"


def attention_width(layer: Layer, d_model: int) -> float:
    """A of one layer: width times the share of earlier tokens that its softmax attention sees."""
    if layer.kind == "split":
        width = layer.n_shared * layer.d_thin
        if layer.attention == "softmax":
            density = 1 if layer.coverage == "full" else layer.top_k / layer.n_routed
            width += layer.top_k * layer.d_thin * density
        return width
    return 0 if getattr(layer, "attention", "softmax") == "deltanet" else d_model


def training_flop(config: ModelConfig, length: int) -> FlopCount:
    """Operations of a training step for each token of sequences of `length`."""
    attention = sum(attention_width(layer, config.d_model) for layer in config.layers())
    return FlopCount(active_parameters(config), attention, length)


def mfu(
    config: ModelConfig, length: int, tokens_per_s: float, gpu: str
) -> tuple[float | None, str]:
    """MFU on one GPU of this name (None for an unknown one), and its formula with the numbers."""
    if gpu not in PEAK_FLOPS:
        known = ", ".join(PEAK_FLOPS)
        return None, f"no MFU: the peak of {gpu} is not known here (known: {known})"
    flop, peak = training_flop(config, length), PEAK_FLOPS[gpu]
    share = flop.total * tokens_per_s / peak
    return share, f"MFU {share:.1%} = ({flop}) x {tokens_per_s:,.0f} token/s / {peak:.3g}"
