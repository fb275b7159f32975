"""A stack of thin blocks, computed in one pass over packed rows (Eq. 1).

Shape suffixes: X tokens (B T), N packed rows, D = d_model, d = d_thin, F = d_ff, E stacked blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mol.model.attention import SoftmaxAttention
from mol.model.config import Attention, SplitLayer
from mol.model.delta import GatedDeltaNet
from mol.model.rank1 import Rank1Mixture
from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan
from mol.ops.glue import add_norm, norm
from mol.ops.grouped import ffn_sum, gathered_mm, grouped_mm

ATTENTION = {"softmax": SoftmaxAttention, "deltanet": GatedDeltaNet}


class ThinBlocks(nn.Module):
    """E blocks of one kind, ThinBlock(x) = W_up (Block(h) - h), h = W_down x.

    Block is RMSNorm, attention, RMSNorm, FFN, each half with a residual. Weights carry a leading
    dimension E; rows of all blocks share every product and one attention call.
    """

    def __init__(self, d_model: int, config: SplitLayer, n_blocks: int, attention: Attention):
        super().__init__()
        width = config.d_thin
        self.n_blocks = n_blocks
        self.down = nn.Parameter(torch.empty(n_blocks, d_model, width))
        self.attention_norm = nn.Parameter(torch.empty(n_blocks, width))
        self.attention = ATTENTION[attention](width, config.n_heads, stack=n_blocks)
        self.ffn_norm = nn.Parameter(torch.empty(n_blocks, width))
        if config.rank1 is None:
            self.rank1 = None
            self.ffn_in = nn.Parameter(torch.empty(n_blocks, width, config.d_ff))
            self.ffn_out = nn.Parameter(torch.empty(n_blocks, config.d_ff, width))
        else:
            self.rank1 = Rank1Mixture(width, config.rank1, stack=n_blocks)
        self.up = nn.Parameter(torch.empty(n_blocks, width, d_model))

    def init_weights(self, std: float = 0.02, residual_std: float = 0.02) -> None:
        """Normal weights, unit norms; `residual_std` for what adds to the residual inside a block
        (attention output, FFN output). W_up keeps `std`: the block already returns a small
        difference."""
        nn.init.ones_(self.attention_norm)
        nn.init.ones_(self.ffn_norm)
        self.attention.init_weights(std, residual_std)
        nn.init.normal_(self.down, std=std)
        nn.init.normal_(self.up, std=std)
        if self.rank1 is None:
            nn.init.normal_(self.ffn_in, std=std)
            nn.init.normal_(self.ffn_out, std=residual_std)
        else:
            self.rank1.init_weights(std, residual_std)

    def forward(
        self, x_XD: Tensor, plan: RoutePlan, rope: Rope, cache=None, start: int = 0
    ) -> Tensor:
        """Outputs of the planned rows in packed order, [N, D]; fills an empty `cache`, or continues
        one that holds `start` positions."""
        return self._run(x_XD, plan, lambda h: self.attention.packed(h, plan, rope, cache, start))

    def step(
        self, x_BD: Tensor, plan: RoutePlan, rope: Rope, position: int | Tensor, cache
    ) -> Tensor:
        """The same for one new token a sequence, a plan of length 1, after what `cache` holds."""
        return self._run(
            x_BD, plan, lambda h: self.attention.packed_step(h, plan, rope, position, cache)
        )

    def new_cache(self, batch: int, max_len: int):
        return self.attention.new_cache(batch, max_len)

    def _run(self, x_XD: Tensor, plan: RoutePlan, attend: Callable[[Tensor], Tensor]) -> Tensor:
        h_Nd = gathered_mm(x_XD, self.down, plan)
        mixed_Nd = attend(norm(h_Nd, self.attention_norm, plan))
        attended_Nd, normed_Nd = add_norm(h_Nd, mixed_Nd, self.attention.bias, self.ffn_norm, plan)
        # Block(h) - h, without adding h first: nothing cancels.
        change_Nd = self._add_ffn(attended_Nd, normed_Nd, plan)
        return grouped_mm(change_Nd, self.up, plan.offs_E, plan.equal)

    def _add_ffn(self, attended_Nd: Tensor, h_Nd: Tensor, plan: RoutePlan) -> Tensor:
        """attended + FFN(h)."""
        if self.rank1 is not None:
            return attended_Nd + self._mix_rank1(h_Nd, plan)
        return ffn_sum(h_Nd, self.ffn_in, self.ffn_out, attended_Nd, plan)

    def _mix_rank1(self, h_Nd: Tensor, plan: RoutePlan) -> Tensor:
        if plan.equal:
            return self.rank1(h_Nd.view(self.n_blocks, -1, h_Nd.shape[-1])).view_as(h_Nd)
        # The mixture wants equal groups, so pad to the largest, read on the host. No model of the
        # paper routes blocks that hold rank-1 mixtures; this keeps the combination correct.
        counts_E = torch.diff(plan.offs_E, prepend=plan.offs_E.new_zeros(1)).long()
        largest = int(counts_E.max())
        first_E = plan.offs_E.long() - counts_E
        row_N = torch.arange(h_Nd.shape[0], device=h_Nd.device)
        slot_N = plan.block_N * largest + row_N - first_E[plan.block_N]
        padded = h_Nd.new_zeros(self.n_blocks * largest, h_Nd.shape[-1])
        padded = padded.index_copy(0, slot_N, h_Nd).view(self.n_blocks, largest, -1)
        return self.rank1(padded).flatten(0, 1).index_select(0, slot_N)
