"""Gradients of the grouped product's matrices against block by block products in fp64."""

import pytest
import torch

pytest.importorskip("triton")

from mol.ops.kernels.grouped_weight import WeightTiles, grouped_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16 = torch.bfloat16, torch.float16

# Rows of each block, K, M, dtype.
CASES = {
    "empty blocks": ([0, 40, 1, 0, 17, 0], 48, 40, BF16),
    "one row": ([0, 1], 64, 16, BF16),
    "one block": ([19], 32, 24, FP16),
    "whole steps": ([16, 32, 16], 64, 64, BF16),
    "widths of odd numbers": ([5, 0, 18], 37, 21, FP16),
    "a row and a column more than tiles": ([0, 33, 70], 33, 65, BF16),
    "no rows": ([0, 0], 16, 8, BF16),
}
TILES = {
    "loads": WeightTiles(32, 32, 16, 4, 2, tma=False),
    "copies": WeightTiles(32, 32, 16, 4, 2),
    "wide": WeightTiles(32, 64, 16, 4, 2),
}


def framed(tensor):
    """The same values with NaN before and behind them, at an address that is aligned."""
    memory = torch.full((tensor.numel() + 4096,), torch.nan, dtype=tensor.dtype, device=DEVICE)
    memory[64 : 64 + tensor.numel()] = tensor.flatten()
    return memory[64 : 64 + tensor.numel()].view(tensor.shape)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "how, slots",
    [("loads", None), ("copies", None), ("copies", 3), ("wide", None), ("wide", 2)],
)
def test_gradients(name, how, slots, nan_memory):
    sizes, width_in, width_out, dtype = CASES[name]
    rows, order = sum(sizes), None
    tokens = rows if slots is None else -(-rows // slots)
    if slots is not None:
        order = torch.randperm(tokens * slots)[:rows].to(DEVICE)
    x = framed(torch.randn(tokens, width_in).to(dtype))
    g = framed(torch.randn(rows, width_out).to(dtype))
    offs = torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)
    packed = x if order is None else x[order // slots]
    pairs = zip(packed.double().split(sizes), g.double().split(sizes), strict=True)
    expected = torch.stack([a.T @ b for a, b in pairs])
    wide = grouped_weight(TILES[how], x, g, offs, order, slots or 1, torch.float32)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-4)
    narrow = grouped_weight(TILES[how], x, g, offs, order, slots or 1)
    # One rounding, by truncation at worst (the interpreter's).
    torch.testing.assert_close(narrow.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_a_row_that_is_not_a_number_stays_in_its_block(nan_memory):
    """The rows behind a block's last step are the next block's."""
    x, g = torch.randn(25, 16).to(DEVICE, BF16), torch.randn(25, 8).to(DEVICE, BF16)
    x[17], g[20] = torch.nan, torch.inf
    offs = torch.tensor([17, 21, 25], device=DEVICE, dtype=torch.int32)
    for how in TILES:
        found = grouped_weight(TILES[how], x, g, offs)
        assert found[[0, 2]].isfinite().all() and found[1].isnan().all()
