"""Whole layers, as training runs them, against plain ones, for `mol selfcheck`."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.model.reference import reference_balance, reference_stage
from mol.model.split_stage import SplitStage
from mol.model.transformer import FullWidthLayer
from mol.ops.attention import Rope
from mol.ops.grouped import as_operand
from mol.ops.selfcheck import collect


def layers(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, fast, plain), which return outputs and all gradients by name."""
    for attention in ("softmax", "deltanet"):
        for coverage in ("routed", "full"):
            name = f"one-pass stage, {attention}, {coverage}"
            yield name, *_stage(attention, coverage, device, dtype)
    for norm in ("rms", "layer"):
        yield f"full-width layer, norm = {norm}", *_full_width(norm, device, dtype)


def _stage(
    attention: str, coverage: str, device: torch.device, dtype: torch.dtype
) -> tuple[Callable, Callable]:
    """A 1+2of6 stage and the block loop."""
    config = SplitLayer(
        d_thin=128,
        n_heads=2,
        n_blocks=6,
        n_shared=1,
        top_k=2,
        coverage=coverage,
        attention=attention,
        d_ff=93,
    )
    rope = Rope(64)

    def fast(stage: SplitStage, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance, _ = stage(x, rope)
        # x itself would hide errors of the much smaller update.
        return y - x, balance

    def plain(stage: SplitStage, x: Tensor) -> tuple[Tensor, Tensor]:
        return reference_stage(stage, x, rope) - x, reference_balance(stage, x)

    return _trained(lambda: SplitStage(config, 96), fast, plain, ("x",), device, dtype)


def _full_width(norm: str, device: torch.device, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """A full-width layer whose input is still to be added, and its modules one after another."""
    dense, rope = DenseLayer(n_heads=3, d_ff=93), Rope(32)
    config = ModelConfig(vocab_size=50, d_model=96, n_layers=1, layer=dense, norm=norm)

    def fast(layer: FullWidthLayer, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        attended, ffn, _ = layer(x, rope, None, 0, as_operand(branch, layer.ffn.w_out))
        return attended - x - branch, ffn

    def plain(layer: FullWidthLayer, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        x = x + branch
        attended = layer.attention(layer.attention_norm(x), rope)
        return attended, layer.ffn(layer.ffn_norm(x + attended))

    inputs = "x", "branch"
    return _trained(lambda: FullWidthLayer(config, dense), fast, plain, inputs, device, dtype)


def _trained(
    make: Callable,
    fast: Callable,
    plain: Callable,
    inputs: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Callable, Callable]:
    """`fast(module, **inputs)` as training runs it (bf16: fp32 weights in autocast), and `plain` in
    fp64 on the same weights and inputs [3, 37, 96]. Both return tensors, the first of which is
    compared without gradients, too: other kernels give it then, in part."""
    autocast = dtype == torch.bfloat16
    stored = torch.float32 if autocast else dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make()
        module.init_weights(std=0.1, residual_std=0.1)
        drawn = {name: torch.randn(3, 37, 96).to(device, stored) for name in inputs}
    module = module.to(device=device, dtype=stored)

    def run(function: Callable, module: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {name: t.clone().requires_grad_() for name, t in values.items()}
        found = collect(function(module, **values), values | dict(module.named_parameters()))
        with torch.no_grad():
            return found | {"output without gradients": function(module, **values)[0]}

    def run_fast() -> dict[str, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return run(fast, module, drawn)

    def run_plain() -> dict[str, Tensor]:
        wide = {name: t.double() for name, t in drawn.items()}
        return run(plain, copy.deepcopy(module).double(), wide)

    return run_fast, run_plain
