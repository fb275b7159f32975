"""MFU on shapes counted by hand."""

import pytest

from mol.bench.mfu import attention_width, mfu, training_flop
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.plan.experiments import load_experiments

# V D + L (qkv 3 D^2 + 3 D, out D^2 + D, two matrices 2 D F, two norms 2 D) + a last norm D
DENSE = 100 * 32 + 2 * (4 * 32**2 + 4 * 32 + 2 * 32 * 48 + 2 * 32) + 32


def config(layer, **changes):
    return ModelConfig(
        **{"vocab_size": 100, "d_model": 32, "n_layers": 2, "layer": layer} | changes
    )


def split(**changes):
    return SplitLayer(
        **{"d_thin": 16, "n_heads": 2, "n_blocks": 5, "top_k": 2, "d_ff": 8} | changes
    )


def test_a_dense_model_by_hand():
    flop = training_flop(config(DenseLayer(n_heads=2, d_ff=48)), 10)
    assert (flop.weights, flop.attention, flop.length) == (DENSE, 2 * 32, 10)
    assert flop.total == 6 * DENSE + 6 * 2 * 32 * 10
    share, formula = mfu(config(DenseLayer(n_heads=2, d_ff=48)), 10, 1e9, "NVIDIA H200")
    assert share == pytest.approx(flop.total * 1e9 / 989e12)
    assert f"6 x {DENSE:,} + 6 x 64 x 10" in formula and "9.89e+14" in formula


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (DenseLayer(n_heads=2, d_ff=48), 32),
        (DenseLayer(n_heads=2, d_ff=48, attention="deltanet"), 0),
        (split(coverage="full"), 2 * 16),
        (split(), 2 * 16 * 2 / 5),  # each of two blocks sees two fifths of the tokens
        (split(n_shared=1), 16 + 2 * 16 * 2 / 4),
        (split(n_shared=1, attention="deltanet"), 16),
    ],
)
def test_the_width_that_attends(layer, width):
    assert attention_width(layer, 32) == pytest.approx(width)


def test_gpt2_has_the_public_operations_a_token():
    """124M weights, 12 layers of 768 at T = 1024: 6 N + 6 L d T = 0.80 GFLOP."""
    gpt2 = config(DenseLayer(n_heads=12, d_ff=3072), vocab_size=50257, d_model=768, n_layers=12)
    flop = training_flop(gpt2, 1024)
    assert flop.weights == pytest.approx(123.6e6, rel=2e-3)
    assert flop.total == pytest.approx(6 * flop.weights + 6 * 12 * 768 * 1024)


def test_a_sparse_model_counts_what_a_token_uses():
    paper = load_experiments()
    flop = training_flop(paper.model("mol-2p08b"), 4096)
    assert 0.6e9 < flop.weights < 0.7e9  # of 2.08B
    assert flop.attention == 24 * 512  # the shared block of each layer


@pytest.mark.parametrize("gpu", ["NVIDIA H200 NVL", "NVIDIA B200", "AMD EPYC", ""])
def test_an_unknown_gpu_gets_none(gpu):
    share, formula = mfu(config(DenseLayer(n_heads=2, d_ff=48)), 10, 1e9, gpu)
    assert share is None and formula.startswith("no MFU")
