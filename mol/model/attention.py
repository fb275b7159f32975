"""Softmax attention with biases, for one block or a stack of them (2.1).

Shape suffixes: N packed rows, B sequences, T positions, M width of the block, H heads,
d = M / H, E stacked blocks, S segments (block * B + sequence), L cache length, P = 3 M columns of
the projection (q, k, v).

    attention = SoftmaxAttention(width, n_heads)
    y_BTM = attention(x_BTM, rope)
    cache = attention.new_cache(batch, max_len)
    attention(prompt_BTM, rope, cache)                        # fills an empty cache
    attention(more_BTM, rope, cache, start=T)                 # continues it at position T, or ...
    y_BM = attention.step(x_BM, rope, position, cache)        # ... one token at a time
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mol.ops.attention import Rope, extend_in_cache, segment_attention, step_in_cache
from mol.ops.dispatch import RoutePlan
from mol.ops.glue import biased_heads
from mol.ops.grouped import grouped_mm


@dataclass
class KVCache:
    """Keys and values a segment has seen, and how many (segments grow at their own pace)."""

    keys_SHLd: Tensor
    values_SHLd: Tensor
    used_S: Tensor

    def branch(self, parent_B: Tensor, batch: int) -> "KVCache":
        """A cache whose sequence i holds what sequence `parent_B[i]` of `batch` holds here."""
        parent_S = branched(parent_B, batch, self.used_S.numel())
        return KVCache(self.keys_SHLd[parent_S], self.values_SHLd[parent_S], self.used_S[parent_S])


def branched(parent_B: Tensor, batch: int, segments: int) -> Tensor:
    """Segment of the old cache behind each of a new one whose sequences are `parent_B`."""
    first_E = torch.arange(0, segments, batch, device=parent_B.device)
    return (first_E[:, None] + parent_B).flatten()


class Stackable(nn.Module):
    """Weights of one block, or of `stack` blocks with a leading dimension E.

    `packed(x_NM, plan, rope, cache, start)` and `packed_step(x_NM, plan, rope, position, cache)`
    of the subclasses take packed rows and leave the output `bias` (None, or [E, M]) to the caller,
    who adds more to the result; the methods here wrap them for one block on every token, and only
    `unbiased` leaves it, too.
    """

    bias: Tensor | None = None

    def __init__(self, stack: int | None):
        super().__init__()
        self.stack = stack

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape if self.stack is None else (self.stack, *shape)))

    def stacked(self, weight: Tensor) -> Tensor:
        """`weight` with its leading dimension E, 1 for a single block."""
        return weight[None] if self.stack is None else weight

    def _project(self, x_NM: Tensor, plan: RoutePlan, weight: Tensor) -> Tensor:
        """Each row times its block's matrix."""
        return grouped_mm(x_NM, self.stacked(weight), plan.offs_E, plan.equal)

    def forward(self, x_BTM: Tensor, rope: Rope, cache=None, start: int = 0) -> Tensor:
        return self._biased(self.unbiased(x_BTM, rope, cache, start))

    def unbiased(self, x_BTM: Tensor, rope: Rope, cache=None, start: int = 0) -> Tensor:
        batch, length, width = x_BTM.shape
        plan = RoutePlan.full(1, batch, length, x_BTM.device)
        return self.packed(x_BTM.reshape(-1, width), plan, rope, cache, start).view_as(x_BTM)

    def step(self, x_BM: Tensor, rope: Rope, position: int | Tensor, cache) -> Tensor:
        plan = RoutePlan.full(1, x_BM.shape[0], 1, x_BM.device)
        return self._biased(self.packed_step(x_BM, plan, rope, position, cache))

    def _biased(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)


class SoftmaxAttention(Stackable):
    """Causal attention, q, k, v and o each with a bias: 4 M^2 + 4 M weights a block."""

    def __init__(self, width: int, n_heads: int, stack: int | None = None):
        super().__init__(stack)
        self.n_heads = n_heads
        self.qkv = self.weight(width, 3 * width)
        self.qkv_bias = self.weight(3 * width)
        self.out = self.weight(width, width)
        self.out_bias = self.weight(width)
        if not self.out.is_meta:  # drawing nothing takes seconds there
            self.init_weights()

    def init_weights(self, std: float = 0.02, residual_std: float = 0.02) -> None:
        """Normal projections, zero biases; `residual_std` for the output projection."""
        nn.init.normal_(self.qkv, std=std)
        nn.init.normal_(self.out, std=residual_std)
        nn.init.zeros_(self.qkv_bias)
        nn.init.zeros_(self.out_bias)

    @property
    def bias(self) -> Tensor:
        return self.stacked(self.out_bias)

    def packed(
        self,
        x_NM: Tensor,
        plan: RoutePlan,
        rope: Rope,
        cache: KVCache | None = None,
        start: int = 0,
    ) -> Tensor:
        """Attention inside each segment at the rows' original positions, `start` the first one's.
        Fills an empty cache, or continues one that holds `start` positions."""
        end = start + plan.length
        check_room(cache, end)
        qkv = self._project(x_NM, plan, self.qkv)
        q, k, v = self._heads(qkv, rope, plan, start, end)
        if start:
            held = cache.keys_SHLd, cache.values_SHLd
            rows = plan.segment_N, plan.within_N, cache.used_S
            o_NHd = extend_in_cache(q, k, v, *held, *rows, end, plan.length)
            cache.used_S += plan.cu_seqlens.diff()
        else:
            o_NHd = segment_attention(q, k, v, plan.cu_seqlens, plan.length)
            if cache is not None:
                held = cache.keys_SHLd.dtype  # the weights', which autocast does not keep to
                cache.keys_SHLd[plan.segment_N, :, plan.within_N] = k.to(held)
                cache.values_SHLd[plan.segment_N, :, plan.within_N] = v.to(held)
                cache.used_S.copy_(plan.cu_seqlens.diff())
        return self._project(o_NHd.reshape(x_NM.shape), plan, self.out)

    def _heads(
        self, qkv_NP: Tensor, rope: Rope, plan: RoutePlan, start: int | Tensor, end: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias_EP = self.stacked(self.qkv_bias)
        return biased_heads(qkv_NP, bias_EP, self.n_heads, rope, plan, start, end)

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        width = self.out.shape[-1]
        shape = ((self.stack or 1) * batch, self.n_heads, max_len, width // self.n_heads)
        return KVCache(
            self.out.new_zeros(shape),
            self.out.new_zeros(shape),
            torch.zeros(shape[0], dtype=torch.int64, device=self.out.device),
        )

    def packed_step(
        self, x_NM: Tensor, plan: RoutePlan, rope: Rope, position: int | Tensor, cache: KVCache
    ) -> Tensor:
        """One new row for each segment of `plan` (of length 1), all at `position`, or each at its
        sequence's (int64 [B])."""
        room = cache.keys_SHLd.shape[2]
        if isinstance(position, int):
            check_room(cache, position + 1)
        elif position.numel() > 1:
            position = position[plan.segment_N % plan.batch]
        qkv = self._project(x_NM, plan, self.qkv)
        q, k, v = self._heads(qkv, rope, plan, position, room)
        # No segment holds more rows than there are positions.
        longest = position + 1 if isinstance(position, int) else room
        held = cache.keys_SHLd, cache.values_SHLd, plan.segment_N, cache.used_S
        o_NHd = step_in_cache(q, k, v, *held, longest)
        return self._project(o_NHd.reshape(x_NM.shape), plan, self.out)


def check_room(cache: KVCache | None, length: int) -> None:
    if cache is not None and length > cache.keys_SHLd.shape[2]:
        raise ValueError(
            f"{length} tokens do not fit in the cache's {cache.keys_SHLd.shape[2]} positions; "
            "create it with a larger max_len"
        )
