"""Products of routed blocks at widths that the project's own kernels train, for `mol selfcheck`.

Shape suffixes as in `mol.ops.grouped`.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import ffn_sum, gathered_mm, grouped_mm, grouped_mm_reference

WIDTH, INNER = 1024, 256  # DeltaNet 1+3of15's, which `mol.ops.grouped_train.OWN` names


def trained_products(draw: Callable, plan: RoutePlan) -> tuple[Callable, Callable, dict]:
    """A block without its attention, fast and plain, and the operands of both."""

    def fast(x_XD: Tensor, down: Tensor, w_in: Tensor, w_out: Tensor, up: Tensor) -> Tensor:
        h_Nd = gathered_mm(x_XD, down, plan)
        return grouped_mm(ffn_sum(h_Nd, w_in, w_out, h_Nd, plan), up, plan.offs_E)

    def plain(x_XD: Tensor, down: Tensor, w_in: Tensor, w_out: Tensor, up: Tensor) -> Tensor:
        def times(t: Tensor, w: Tensor) -> Tensor:
            return grouped_mm_reference(t, w, plan.offs_E)

        h_Nd = times(x_XD[plan.order_N // plan.slots], down)
        return times(h_Nd + times(F.gelu(times(h_Nd, w_in), approximate="tanh"), w_out), up)

    blocks, tokens = plan.n_blocks, plan.batch * plan.length
    shapes = {"down": (WIDTH, INNER), "w_in": (INNER, WIDTH), "w_out": (WIDTH, INNER)}
    shapes["up"] = INNER, WIDTH
    weights = {name: draw(blocks, *shape, scale=shape[0] ** -0.5) for name, shape in shapes.items()}
    return fast, plain, {"x_XD": draw(tokens, WIDTH), **weights}
