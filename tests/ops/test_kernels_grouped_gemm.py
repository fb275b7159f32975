"""The grouped product with gathered rows, GELU and addition against row by row products in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from mol.model.config import SplitLayer
from mol.model.thin_block import ThinBlocks
from mol.ops import dispatch, gated_delta, glue, grouped
from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan
from mol.ops.kernels import grouped_gemm as kernels
from mol.ops.kernels.grouped_gemm import Tiles, grouped_gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16 = torch.bfloat16, torch.float16

# Rows of each block, K, M, dtype.
CASES = {
    "empty blocks": ([0, 40, 1, 0, 70, 0], 48, 40, BF16),
    "one row": ([0, 1], 64, 16, BF16),
    "one block": ([19], 32, 24, FP16),
    "whole tiles": ([16, 32, 16], 64, 64, BF16),
    "widths of odd numbers": ([5, 0, 18], 37, 21, FP16),
    "many blocks": ([n % 4 for n in range(33)], 16, 16, BF16),
    "first block empty, a column more than tiles": ([0, 33, 17], 96, 65, BF16),
}
TILES = {
    "loads": Tiles(32, 32, 16, 4, 2),
    "copies": Tiles(32, 32, 16, 4, 2, tma=True),
    "resident": Tiles(32, 32, 16, 4, 2, tma=True, resident=True),
}


def framed(tensor):
    """The same values with NaN before and behind them, at an address that is aligned."""
    memory = torch.full((tensor.numel() + 4096,), torch.nan, dtype=tensor.dtype, device=DEVICE)
    memory[64 : 64 + tensor.numel()] = tensor.flatten()
    return memory[64 : 64 + tensor.numel()].view(tensor.shape)


def operands(sizes, width_in, width_out, dtype, slots=None):
    """x, w, offsets, order; with `slots` x has a row for so many packed ones, in random order."""
    rows = sum(sizes)
    order = None
    if slots is not None:
        order = torch.randperm(-(-rows // slots) * slots)[:rows].to(DEVICE)
    x = torch.randn(rows if slots is None else -(-rows // slots), width_in)
    w = torch.randn(len(sizes), width_in, width_out) / width_in**0.5
    offs = torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)
    return framed(x.to(dtype)), framed(w.to(dtype)), offs, order


def plain(x, w, sizes, rows):
    """Row by row, in fp64."""
    blocks = torch.repeat_interleave(torch.tensor(sizes)).tolist()
    pairs = zip(rows, blocks, strict=True)
    return torch.stack([x[row].double() @ w[block].double() for row, block in pairs])


def check(found, expected):
    """One rounding, by truncation at worst (the interpreter's), of sums in fp32."""
    ulp = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=ulp, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how, slots", [("loads", 3), ("copies", None), ("resident", None)])
def test_products(name, how, slots, monkeypatch, nan_memory):
    sizes, width_in, width_out, dtype = CASES[name]
    if len(sizes) > 8 and how != "resident" and DEVICE == "cpu":
        pytest.skip("a program for each of so many blocks takes the interpreter long")
    monkeypatch.setattr(kernels, "tiles_for", lambda *shape: TILES[how])
    x, w, offs, order = operands(sizes, width_in, width_out, dtype, slots)
    rows = range(sum(sizes)) if slots is None else (order // slots).tolist()
    expected = plain(x, w, sizes, rows)
    add = framed(torch.randn(expected.shape).to(dtype))
    given = (x, w, offs, order, slots or 1)
    check(grouped_gemm(*given, False, None), expected)
    check(grouped_gemm(*given, True, None), F.gelu(expected, approximate="tanh"))
    check(grouped_gemm(*given, False, add), expected + add.double())


@pytest.mark.parametrize("rows_a_block", [1, 13, 25, 60, 100, 4000])
@pytest.mark.parametrize("widths", [(192, 520), (37, 70)], ids=str)
def test_every_rule_for_tiles_computes(rows_a_block, widths, nan_memory):
    """Tiles chosen for many rows compute few of them, too, and the other way round."""
    sizes = [7, 0, 35]
    tiles = kernels.tiles_for(False, *widths, False, 3 * rows_a_block, 3)
    x, w, offs, _ = operands(sizes, *widths, BF16)
    expected = plain(x, w, sizes, range(42))
    check(kernels.launch(tiles, x, w, offs, None, 1, False, None), expected)


@pytest.mark.parametrize("width_out", [512, 2064])
@pytest.mark.parametrize("sequences", [3, 8, 32, 64, 128])
def test_a_decode_step_keeps_an_h200_reading(width_out, sequences):
    """MoL 2.08B's products, three of 14 blocks a token: at least 29 KB under way for each of 132
    multiprocessors when all blocks have rows, in programs that fit beside each other."""
    tiles = kernels.tiles_for(True, 2048, width_out, False, 3 * sequences, 14)
    programs = 14 * math.ceil(width_out / tiles.columns)
    staged = tiles.depth * tiles.columns * 2
    assert programs * (tiles.stages - 1) * staged >= 132 * 29_000
    shared_memory = tiles.stages * (staged + tiles.depth * tiles.rows * 2)
    assert min(programs / 132, 2) * shared_memory <= 227 * 1024
    assert tiles.rows >= 3 * sequences / 14


@pytest.mark.filterwarnings("ignore:overflow")
def test_infinite_and_nan_sums_stay_in_their_rows(nan_memory):
    """GELU of huge sums is 0 or the sum, and a row that is not a number spoils no other one."""
    x, w, offs, _ = operands([3, 4], 32, 16, BF16)
    x[1] = torch.nan
    x[2], w[0] = 1e18, w[0].sign()
    y = grouped_gemm(x, w, offs, None, 1, True, None)
    expected = F.gelu(plain(x, w, [3, 4], range(7)), approximate="tanh")
    assert y[1].isnan().all()
    kept = [0, 2, 3, 4, 5, 6]
    check(y[kept], expected[kept])


@pytest.mark.parametrize("blocks", [1, 3])
def test_thin_blocks_use_it_without_gradients(blocks, monkeypatch):
    """The rows of routed blocks come out as by PyTorch's operations, gathered and added in the
    products; a single block adds in its product, too."""
    torch.manual_seed(0)
    layer = SplitLayer(n_blocks=blocks, top_k=1, d_thin=32, n_heads=2, d_ff=24)
    with torch.device(DEVICE):
        stack, rope = ThinBlocks(48, layer, blocks, "softmax"), Rope(16)
        stack.init_weights(0.2, 0.2)
        x_XD = torch.randn(40, 48).half()
        chosen_BTk = torch.randint(blocks, (2, 20, 1))
    plan = RoutePlan.routed(chosen_BTk, blocks)
    with torch.no_grad():
        expected = stack.double()(x_XD.double(), plan, rope)
    stack.half()
    products = []
    for module in (dispatch, gated_delta, glue, grouped):
        monkeypatch.setattr(module, "has_kernels", lambda tensor: True)
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a: products.append(a[1:]) or launch(*a))
    with torch.no_grad():
        found = stack(x_XD, plan, rope)
    assert (found.double() - expected).norm() < 4e-3 * expected.norm()
    # (gathered, gelu, added) of down, qkv, out, ffn_in, ffn_out, up
    plain = (False, False, False)
    fused = [(True, False, False), plain, plain, (False, True, False), (False, False, True), plain]
    kinds = [(order is not None, gelu, add is not None) for *_, order, _, gelu, add in products]
    assert kinds == (fused if blocks > 1 else [])
