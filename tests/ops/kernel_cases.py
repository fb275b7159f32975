"""What the tests of the kernels over packed rows share: shapes, poisoned memory, the comparison."""

import torch

from mol.ops.dispatch import RoutePlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One rounding of bf16 is 2^-9; the gradient before SiLU is rounded on its way, too.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# Blocks each token of each sequence goes to: (batch, length, blocks, slots), then heads and width.
CASES = {
    "routed": (2, 23, 4, 2, 2, 16),
    "odd width": (1, 21, 3, 1, 3, 12),
    "one row": (1, 1, 4, 1, 1, 8),
    "many blocks": (2, 5, 11, 2, 1, 8),
    "one block": (2, 19, 1, 1, 2, 32),
    "wide": (1, 45, 2, 1, 1, 128),
}
SEVERAL_TILES = (1, 80, 2, 1, 1, 128)  # of a block


def route_plan(batch, length, blocks, slots):
    """Block 1 gets no row where tokens can do without it."""
    scores = torch.rand(batch, length, blocks)
    if blocks - 1 > slots:
        scores[..., 1] = -1
    return RoutePlan.routed(scores.topk(slots).indices.to(DEVICE), blocks)


def compare(function, reference, inputs, dtypes, *rest):
    """Runs `function` in `dtypes`, the reference on the same rounded numbers in fp64."""
    narrow = [t.to(DEVICE, d) for t, d in zip(inputs, dtypes, strict=True)]
    rounded = [t.double() for t in narrow]
    found, wanted = [], []
    for run, tensors, into in ((function, narrow, found), (reference, rounded, wanted)):
        leaves = [restride(t, original) for t, original in zip(tensors, inputs, strict=True)]
        outputs = run(*leaves, *rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        # Positive, so that the sums over rows do not cancel to less than their terms' rounding.
        weights = [torch.rand(o.shape, dtype=torch.float64).to(DEVICE) for o in outputs]
        loss = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True))
        into += [*outputs, *torch.autograd.grad(loss, leaves)]
    tolerance = TOLERANCES[dtypes[0]]
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape
        scale = other.norm().clamp(min=1e-9)
        error = ((one.double() - other).norm() / scale).item()
        assert error < tolerance, f"result {number}: {error}"
    return found


def restride(t, original):
    """A leaf with the strides of `original`, NaN between its rows, before and behind."""
    if original.is_contiguous():
        return t.clone().requires_grad_()
    wide = t.new_full((t.shape[0] + 8, original.stride(0)), torch.nan)
    view = wide[4:-4, : t.shape[1]]
    view.copy_(t)
    return view.detach().requires_grad_()
