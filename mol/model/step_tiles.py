"""What the launches of a fast decode step share: the rows, and how programs divide weights.

Shape suffixes: B tokens, k slots a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 32768  # weights that a program reads at once: 64 KiB in bf16


@dataclass(frozen=True)
class Rows:
    """The rows of a step and the routed ones' blocks (int32 [B * k], known on the device)."""

    batch: int
    shared: int
    slots: int
    block: Tensor

    @property
    def count(self) -> int:
        return self.batch * (self.shared + self.slots)

    @property
    def groups(self) -> int:
        return self.shared + self.batch * self.slots

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": self.batch, "S": self.shared}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.block.device)


def power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def depth(width: int, splits: int, least: int = 16) -> int:
    """Rows of a tile, a power of two, such that at most `splits` tiles cover `width`."""
    return max(least, power(-(-width // splits)))


def tiled(deep: int) -> dict[str, int]:
    columns = max(16, min(64, TILE // deep))
    return {"DEEP": deep, "COLUMNS": columns, "num_warps": warps(deep * columns)}


def warps(weights: int) -> int:
    """Up to 128 weights a thread."""
    return max(4, min(16, weights // 4096))


def grid(groups: int, width: int, tiling: dict[str, int], splits: int = 1) -> tuple[int, int, int]:
    return groups, -(-width // tiling["COLUMNS"]), splits
