"""Every fast path against its plain reference, outputs and all gradients, on this machine.

Kernels are chosen by device and installed versions, and some combinations are known to compute
wrong gradients behind a right forward pass, so a GPU training run calls `run_checks` first.

Each check draws inputs, rounds them to the precision under test, runs the fast path there and the
reference in fp64 on the same rounded values, and reports the largest relative error
||fast - plain|| / ||plain|| over the outputs and the gradient of every input and weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops import cross_entropy
from mol.ops.attention import (
    segment_attention,
    segment_attention_reference,
    step_in_cache,
    step_in_cache_reference,
)
from mol.ops.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    weighted_cross_entropy,
)
from mol.ops.dispatch import RoutePlan
from mol.ops.gated_delta import gated_delta_rule, naive_gated_delta_rule
from mol.ops.grouped import gathered_mm, grouped_mm, grouped_mm_reference
from mol.ops.selfcheck_train import INNER, WIDTH, trained_products
from mol.ops.short_conv import short_conv, short_conv_reference

# On a CPU the project runs in fp32 and is tested in fp64; on CUDA it trains in bf16, where one
# rounding is 2^-9 = 0.2 % and a chain of them about 1 %.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
STAGE_TOLERANCES = TOLERANCES | {torch.bfloat16: 5e-2}  # about ten products in a row
LENGTHS = (0, 1, 130, 0, 17)  # rows of each segment


@dataclass(frozen=True)
class Check:
    """Outcome of one comparison; `error` is None when the fast path raised (`detail` says what)."""

    name: str
    device: str
    dtype: str
    error: float | None
    tolerance: float
    worst: str  # the output or gradient with the largest error
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance  # NaN fails


def run_checks(device: str) -> list[Check]:
    """All checks on `device`: in fp64 and fp32 on "cpu", in bf16 on "cuda" """
    dtypes = [torch.bfloat16] if device == "cuda" else [torch.float64, torch.float32]
    checks = []
    for dtype in dtypes:
        for name, fast, plain, tolerance in _comparisons(torch.device(device), dtype):
            error, worst, detail = None, "", ""
            try:
                error, worst = _largest_error(fast(), plain())
            except Exception as problem:  # compilers of kernels raise types of their own
                detail = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            label = str(dtype).removeprefix("torch.")
            checks.append(Check(name, device, label, error, tolerance, worst, detail))
    return checks


def _largest_error(fast: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[float, str]:
    errors = {}
    for name, expected in plain.items():
        difference = fast[name].double() - expected
        scale = expected.norm()
        # A zero gradient has no relative error: compare absolutely.
        errors[name] = (difference.norm() / (scale if scale else 1)).item()
    nan = [name for name, error in errors.items() if error != error]
    worst = nan[0] if nan else max(errors, key=errors.get)
    return errors[worst], worst


def _with_gradients(function: Callable, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of `function(**inputs)` and the gradients of a fixed weighting of them."""
    inputs = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return collect(outputs, inputs)


def collect(outputs: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs by number, and the gradient of each input under fixed weights of the outputs."""
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        loss = loss + (output * weights.to(output)).sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
    results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return results | {f"grad {name}": g for name, g in zip(inputs, gradients, strict=True)}


def _comparisons(device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """(name, fast, plain, tolerance) of each check; the functions return named tensors."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return drawn.to(device=device, dtype=dtype)

    def pair(name: str, fast: Callable, plain: Callable, **inputs: Tensor) -> tuple:
        wide = {key: tensor.double() for key, tensor in inputs.items()}
        runs = (lambda: _with_gradients(fast, inputs), lambda: _with_gradients(plain, wide))
        return (name, *runs, TOLERANCES[dtype])

    rows, heads, width = sum(LENGTHS), 2, 64
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)

    def delta(rule: Callable) -> Callable:
        def run(q, k, v, g, beta, state):
            return rule(q, k, v, -g.abs(), beta.sigmoid(), cu_seqlens, state, True)

        return run

    qkv = {name: draw(rows, heads, width) for name in "qkv"}
    rates = {"g": draw(rows, heads), "beta": draw(rows, heads)}
    state = draw(len(LENGTHS), heads, width, width, scale=0.1)
    if device.type == "cuda":
        state = state.float()
    yield pair(
        "gated delta rule",
        delta(gated_delta_rule),
        delta(naive_gated_delta_rule),
        **qkv,
        **rates,
        state=state,
    )
    yield pair(
        "causal attention over segments",
        lambda q, k, v: segment_attention(q, k, v, cu_seqlens, max(LENGTHS)),
        lambda q, k, v: segment_attention_reference(q, k, v, cu_seqlens),
        **qkv,
    )
    segment_N = torch.repeat_interleave(cu_seqlens.diff().long())
    for width_out in (64, 93):
        yield pair(
            f"grouped product 48 to {width_out}",
            lambda x, w: grouped_mm(x, w, cu_seqlens[1:]),
            lambda x, w: torch.einsum("nk,nkm->nm", x, w[segment_N]),
            x=draw(rows, 48),
            w=draw(len(LENGTHS), 48, width_out),
        )
    chosen = torch.rand(3, 29, 7, generator=generator).topk(2).indices.to(device)
    plan = RoutePlan.routed(chosen, 7)
    yield pair(
        "short convolution",
        lambda x, w: short_conv(x, w, plan),
        lambda x, w: short_conv_reference(x, w, plan),
        x=draw(3 * 29 * 2, 24),
        w=draw(7, 24, 4),
    )
    fast, plain, operands = trained_products(draw, plan)
    yield pair(f"grouped products {WIDTH} and {INNER} wide", fast, plain, **operands)
    yield "grouped products without gradients", *_products(draw, plan), TOLERANCES[dtype]
    yield from _decode(draw, device, TOLERANCES[dtype])
    targets = torch.randint(0, 301, (77,), generator=generator).to(device)
    yield pair(
        "linear cross-entropy",
        lambda hidden, weight: _small_chunks(hidden, weight, targets),
        lambda hidden, weight: _whole_loss(hidden, weight, targets),
        hidden=draw(77, 40),
        weight=draw(301, 40),
    )
    # Imported here, as models import this package.
    from mol.ops.selfcheck_layers import layers
    from mol.ops.selfcheck_step import decode_steps, prompts

    for name, fast, plain in (
        *layers(device, dtype),
        *prompts(device, dtype),
        *decode_steps(device, dtype),
    ):
        yield name, fast, plain, STAGE_TOLERANCES[dtype]


def _products(draw: Callable, plan: RoutePlan) -> tuple[Callable, Callable]:
    """Products that gather, apply GELU and add as they go, and the loop over groups."""
    tokens = plan.batch * plan.length
    x, more = draw(tokens, 192), draw(tokens * plan.slots, 320)
    down, up = (draw(plan.n_blocks, 192, width, scale=192**-0.5) for width in (93, 320))

    def fast() -> dict[str, Tensor]:
        rows = plan.gather(x)
        with torch.no_grad():
            return {
                "gathered": gathered_mm(x, down, plan),
                "GELU": grouped_mm(rows, up, plan.offs_E, gelu=True),
                "sum": grouped_mm(rows, up, plan.offs_E, add_NM=more),
            }

    def plain() -> dict[str, Tensor]:
        rows = x.double()[plan.order_N // plan.slots]
        wide = grouped_mm_reference(rows, up.double(), plan.offs_E)
        return {
            "gathered": grouped_mm_reference(rows, down.double(), plan.offs_E),
            "GELU": F.gelu(wide, approximate="tanh"),
            "sum": wide + more.double(),
        }

    return fast, plain


def _decode(draw: Callable, device: torch.device, tolerance: float) -> Iterator[tuple]:
    """What a decode step calls, without gradients: a row against a cache of which only a part
    counts, and the product of a few rows, most blocks without one."""
    qkv, cached = draw(3, 3, 2, 64), draw(2, 5, 2, 700, 64)
    cached[:, :, :, 650:] = torch.nan  # beyond what any segment holds
    segment, used = (torch.tensor(t, device=device) for t in ([4, 0, 2], [0, 9, 333, 9, 649]))
    x, w = draw(5, 300), draw(7, 300, 93)
    offs = torch.tensor([0, 2, 2, 2, 4, 5, 5], device=device, dtype=torch.int32)

    def attend(kind: Callable, qkv: Tensor, cached: Tensor) -> dict[str, Tensor]:
        (keys, values), counts = cached.clone(), used.clone()
        with torch.no_grad():
            output = kind(*qkv, keys, values, segment, counts, 650)
        kept = torch.stack([keys, values])[:, :, :, :650]
        return {"output": output, "cache": kept, "counts": counts.double()}

    def product(kind: Callable, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": kind(x, w, offs)}

    yield (
        "one row against a cache",
        lambda: attend(step_in_cache, qkv, cached),
        lambda: attend(step_in_cache_reference, qkv.double(), cached.double()),
        tolerance,
    )
    yield (
        "grouped product of a few rows",
        lambda: product(grouped_mm, x, w),
        lambda: product(grouped_mm_reference, x.double(), w.double()),
        tolerance,
    )


def _shares(targets: Tensor) -> Tensor:
    return torch.linspace(0, 1, len(targets), device=targets.device)


def _small_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and their weighted sum, with chunks so small that a short input has several."""
    usual = dict(cross_entropy.LOGITS_AT_ONCE)
    cross_entropy.LOGITS_AT_ONCE.update(dict.fromkeys(usual, 20 * weight.shape[0]))
    try:
        losses = linear_cross_entropy(hidden, weight, targets)
        return losses, weighted_cross_entropy(hidden, weight, targets, _shares(targets))
    finally:
        cross_entropy.LOGITS_AT_ONCE.update(usual)


def _whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = linear_cross_entropy_reference(hidden, weight, targets)
    return losses.detach(), (losses * _shares(targets)).sum()
