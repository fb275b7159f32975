"""What autograd keeps of a forward pass for the backward pass."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Inside, `bytes` counts what autograd saves, each storage once, weights left out.

    with Saved(model.parameters()) as saved:
        loss = model(x).sum()
    saved.bytes
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights = {p.untyped_storage().data_ptr() for p in weights}
        # The tensors stay here, so that no second one gets the address of a first.
        self._found: dict[int, tuple[int, Tensor]] = {}
        super().__init__(self._keep, lambda x: x)

    def __enter__(self) -> "Saved":
        super().__enter__()
        return self

    def _keep(self, x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in self._weights:
            self._found[place] = x.untyped_storage().nbytes(), x
        return x

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self._found.values())
