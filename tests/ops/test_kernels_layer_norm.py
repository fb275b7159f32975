"""Norms at full width with the addition before them, against PyTorch in fp64, every gradient."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, compare

pytest.importorskip("triton")

from mol.model.config import ModelConfig
from mol.model.transformer import LanguageModel
from mol.ops import glue
from mol.ops.kernels import layer_norm
from mol.ops.kernels.layer_norm import add_layer_norm

pytestmark = pytest.mark.usefixtures("nan_memory")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {
    "odd width": (3, 7, 48),
    "one row": (1, 1, 8),
    "wide": (5, 1000),
    "wider than a tile": (3, 2100),
    "a power of two": (2, 5, 64),
}


def plain(x, a, bias, weight, shift):
    if a is not None:
        x = x + (a if bias is None else a + bias)
    if shift is None:
        return x, F.rms_norm(x, weight.shape, weight, 1e-5)
    return x, F.layer_norm(x, weight.shape, weight, shift, 1e-5)


def operands(shape):
    """Rows so small that eps counts, with a mean."""
    x, a = torch.randn(2, *shape, dtype=torch.float64) / 100 + 0.003
    bias, weight, shift = torch.randn(3, shape[-1], dtype=torch.float64)
    return {"x": x, "a": a, "bias": bias[None] / 100, "weight": weight, "shift": shift}


def compare_all(shape, dtypes, product):
    """LayerNorm and RMSNorm: with everything, without the bias, and the norm alone."""
    numbers = operands(shape)
    kinds = dict(zip(numbers, dtypes, strict=True))
    for absent in (
        (),
        ("bias",),
        ("a", "bias"),
        ("shift",),
        ("shift", "bias"),
        ("shift", "a", "bias"),
    ):
        names = [name for name in numbers if name not in absent]

        def call(function, *tensors, names=names):
            given = dict(zip(names, tensors, strict=True))
            both = function(*map(given.get, numbers))
            return both if "a" in given else both[1]

        found = compare(
            partial(call, lambda *given: add_layer_norm(*given, product)),
            partial(call, plain),
            [numbers[name] for name in names],
            [kinds[name] for name in names],
        )
        outputs = [product] if "a" in absent else [kinds["x"], product]
        assert [t.dtype for t in found] == outputs + [kinds[name] for name in names]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_norms(shape):
    compare_all(shape, [F32] * 5, F32)


def test_several_tiles_a_program(monkeypatch):
    monkeypatch.setattr(layer_norm, "FORWARD", 3)
    monkeypatch.setattr(layer_norm, "BACKWARD", 2)
    compare_all((53, 1000), [F32] * 5, F32)


def test_fewer_rows_than_a_tile_in_the_last(monkeypatch):
    monkeypatch.setattr(layer_norm, "ELEMENTS", 256)  # 4 rows of 64
    compare_all((11, 48), [F32] * 5, F32)


# What autocast has, and all in one precision.
@pytest.mark.parametrize(
    "dtypes, product",
    [([BF16] * 5, BF16), ([F16] * 5, F16), ([F32, BF16, F32, F32, F32], BF16)],
    ids=["bf16", "fp16", "autocast"],
)
def test_norms_in_low_precision(dtypes, product, monkeypatch):
    if dtypes[0] == F32:  # x' and its gradient are exact, the rest is rounded
        monkeypatch.setitem(compare.__globals__["TOLERANCES"], F32, 1e-2)
    compare_all((2, 9, 48), dtypes, product)


def test_the_sum_is_not_rounded_to_the_branchs_precision():
    x, a, bias = (torch.randn(s, 48, device=DEVICE) for s in (5, 5, 1))
    x, weight = x.requires_grad_(), torch.ones(48, device=DEVICE)
    summed, _ = add_layer_norm(x, a.bfloat16(), bias, weight, None, BF16)
    expected = x.double() + a.bfloat16().double() + bias.double()
    torch.testing.assert_close(summed.double(), expected, atol=1e-6, rtol=0)
    grad = torch.randn(5, 48, device=DEVICE)
    assert torch.equal(*torch.autograd.grad(summed, x, grad), grad)  # the norm was not used


def test_without_an_addition_nothing_is_copied():
    x, weight = torch.randn(5, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    assert add_layer_norm(x, None, None, weight, None, F32)[0] is x


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_has_the_gradients_of_its_modules(norm, recompute, monkeypatch):
    if DEVICE == "cpu":  # by these kernels alone
        monkeypatch.setattr(glue, "has_kernels", lambda t: t.dim() == 3 and t.dtype == F32)
    layer = {"kind": "dense", "n_heads": 2, "d_ff": 20}
    config = ModelConfig(
        vocab_size=50, d_model=16, n_layers=3, layer=layer, norm=norm, init_std=0.3
    )
    model = LanguageModel(config).to(DEVICE)
    exact = copy.deepcopy(model).double()
    model.checkpoint_activations = recompute
    ids = torch.randint(50, (2, 9), device=DEVICE)
    for one in (model, exact):
        one(ids).hidden.pow(3).sum().backward()
    for (name, weight), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (weight.grad - other.grad).norm() / other.grad.norm()
        assert error < 1e-5, (name, error)


def test_compilers_know_the_shapes_and_gradients():
    wide = {k: t.to(DEVICE, F32).requires_grad_() for k, t in operands((3, 5, 24)).items()}
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    for absent in ((), ("bias",), ("a", "bias", "shift")):
        given = [None if name in absent else t for name, t in wide.items()]
        arguments = (*given, BF16, 1e-5)
        torch.library.opcheck(torch.ops.mol.add_layer_norm, arguments, test_utils=checks)
