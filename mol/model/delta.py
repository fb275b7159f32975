"""Gated DeltaNet layer, for one block or a stack of them (3.2; Yang et al., 2024).

Shape suffixes: N packed rows, M width of the block, H heads, d = M / H, E stacked blocks,
S segments (block * B + sequence), C = 3 M convolved channels, J = 4 taps, Z = 4 M + 2 H columns
of the projection (q, k, v, gate, a, b).

Same interface as `mol.model.attention.SoftmaxAttention`; the rotary table is ignored, since order
comes from the convolution and the recurrence.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mol.model.attention import Stackable, branched
from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan
from mol.ops.glue import delta_inputs, delta_step, gated_delta

TAPS = 4


@dataclass
class DeltaCache:
    """What a segment remembers: the last J - 1 rows before the convolution, and the state."""

    tail_SJC: Tensor
    state_SHdd: Tensor

    def branch(self, parent_B: Tensor, batch: int) -> "DeltaCache":
        """A cache whose sequence i remembers what sequence `parent_B[i]` of `batch` does here."""
        parent_S = branched(parent_B, batch, self.tail_SJC.shape[0])
        return DeltaCache(self.tail_SJC[parent_S], self.state_SHdd[parent_S])


class GatedDeltaNet(Stackable):
    """5 M^2 + 2 M H + 12 M + d + 2 H weights a block, no biases.

    Projections q, k, v, g (M x M) and a, b (M x H); depthwise causal convolution of 4 taps and
    SiLU on q, k, v; decay exp(-exp(A_log) softplus(a + dt_bias)), step size sigmoid(b); the output
    is RMSNorm(o) * SiLU(g) per head, then a projection M x M.
    """

    def __init__(self, width: int, n_heads: int, stack: int | None = None):
        super().__init__(stack)
        self.n_heads = n_heads
        self.qkvg_ab = self.weight(width, 4 * width + 2 * n_heads)
        self.filters = self.weight(3 * width, TAPS)
        self.decay_log = self.weight(n_heads)  # A_log
        self.dt_bias = self.weight(n_heads)
        self.norm = self.weight(width // n_heads)
        self.out = self.weight(width, width)
        if not self.out.is_meta:  # drawing nothing takes seconds there
            self.init_weights()

    def init_weights(self, std: float = 0.02, residual_std: float = 0.02) -> None:
        """Normal projections; decay and step as the public layer starts them: A uniform in
        (0, 16), softplus(dt_bias) log-uniform in (1e-3, 1e-1); filters uniform in +-J^-0.5."""
        nn.init.normal_(self.qkvg_ab, std=std)
        nn.init.normal_(self.out, std=residual_std)
        nn.init.ones_(self.norm)
        bound = TAPS**-0.5
        nn.init.uniform_(self.filters, -bound, bound)
        with torch.no_grad():
            # A = 0 would be log(0); the smallest A kept is far below any that matters.
            self.decay_log.uniform_(0, 16).clamp_(min=1e-4).log_()
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse softplus

    def packed(
        self,
        x_NM: Tensor,
        plan: RoutePlan,
        rope: Rope | None,
        cache: DeltaCache | None = None,
        start: int = 0,
    ) -> Tensor:
        """The layer inside each segment; fills an empty cache, or continues one when `start`, the
        positions before, is not 0."""
        width = x_NM.shape[1]
        z_NZ = self._project(x_NM, plan, self.qkvg_ab)
        qkv, gate, ab = z_NZ.split([3 * width, width, 2 * self.n_heads], -1)
        filters = self.stacked(self.filters)
        before = None
        if start:
            before = self._conv_of_tail(cache.tail_SJC.to(qkv.dtype), filters.to(qkv.dtype), plan)
        decays = self.stacked(self.decay_log), self.stacked(self.dt_bias)
        inputs, unit = delta_inputs(qkv, ab, filters, *decays, plan, before)
        gated_NM, state = gated_delta(
            inputs,
            unit,
            gate,
            self.stacked(self.norm),
            plan,
            cache.state_SHdd if start else None,
            final_state=cache is not None,
        )
        if cache is not None:
            cache.state_SHdd.copy_(state)
            cache.tail_SJC.copy_(self._new_tail(cache.tail_SJC, qkv, plan))
        return self._project(gated_NM, plan, self.out)

    @staticmethod
    def _conv_of_tail(tail_SJC: Tensor, filters_ECJ: Tensor, plan: RoutePlan) -> Tensor:
        """What the rows before a segment's new ones add to the convolution, [N, C]."""
        y_NC = 0
        for back in range(1, TAPS):
            reaches = (plan.within_N < back)[:, None]
            place_N = (TAPS - 1 + plan.within_N - back).clamp(max=TAPS - 2)
            row_NC = tail_SJC[plan.segment_N, place_N].masked_fill(~reaches, 0)
            y_NC = y_NC + plan.expand(filters_ECJ[..., TAPS - 1 - back]) * row_NC
        return y_NC

    @staticmethod
    def _new_tail(tail_SJC: Tensor, qkv_NC: Tensor, plan: RoutePlan) -> Tensor:
        """The last rows of each segment once its new ones are there; an empty cache holds zeros."""
        count_S, ends_S = plan.cu_seqlens.diff().long(), plan.cu_seqlens[1:].long()
        segment_S = torch.arange(len(count_S), device=count_S.device)
        rows = []
        for back in range(TAPS - 1, 0, -1):
            new_SC = qkv_NC[(ends_S - back).clamp(min=0)].to(tail_SJC.dtype)
            place_S = (TAPS - 1 - back + count_S).clamp(max=TAPS - 2)
            rows.append(
                torch.where((count_S >= back)[:, None], new_SC, tail_SJC[segment_S, place_S])
            )
        return torch.stack(rows, 1)

    def new_cache(self, batch: int, max_len: int) -> DeltaCache:
        """The size does not depend on `max_len`."""
        width = self.out.shape[-1]
        segments, head_dim = (self.stack or 1) * batch, width // self.n_heads
        state_dtype = torch.promote_types(self.out.dtype, torch.float32)
        return DeltaCache(
            self.out.new_zeros(segments, TAPS - 1, 3 * width),
            self.out.new_zeros(segments, self.n_heads, head_dim, head_dim, dtype=state_dtype),
        )

    def packed_step(
        self,
        x_NM: Tensor,
        plan: RoutePlan,
        rope: Rope | None,
        position: int | Tensor,
        cache: DeltaCache,
    ) -> Tensor:
        """One new row for each segment of `plan` (of length 1)."""
        weights = (self.filters, self.decay_log, self.dt_bias, self.norm)
        mixed_NM = delta_step(
            self._project(x_NM, plan, self.qkvg_ab),
            *(self.stacked(weight) for weight in weights),
            cache.tail_SJC,
            cache.state_SHdd,
            plan,
        )
        return self._project(mixed_NM, plan, self.out)
