"""Appendix F: the routed blocks of a split stage placed on several ranks.

Shape suffixes: X this rank's tokens (B T), k slots, D = d_model, E routed blocks, e those of this
rank, W ranks, N rows that this rank's blocks compute, S segments.

Two schemes, both equal to one process in outputs and gradients:

- `ExchangedStage`: every rank has sequences of its own. A row (token, block) travels to its block's
  rank and its result back: two all-to-alls forward and two backward. The prototype of Appendix F.
- `SummedStage`: every rank has all the tokens and adds up what its own blocks give; one all-reduce
  forward, one backward. "Only one all-reduce per split stage".

Embedding, norms, routers and shared blocks stand on every rank. A segment, one block's tokens of
one sequence, is whole and in order on the block's rank, as attention and recurrence need it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mol.model.config import SplitLayer
from mol.model.split_stage import Routes, SplitStage, balance_of, squared_variation
from mol.model.thin_block import ThinBlocks
from mol.model.transformer import LanguageModel
from mol.ops.attention import Rope
from mol.ops.collectives import all_to_all, enter_all, exchange, rank, sum_parts, world
from mol.ops.dispatch import RoutePlan, added
from mol.ops.grouped import as_operand

TABLE, COUNT = 4, 8  # bytes of a position or a segment's length, and of a number of sequences


def placement(n_blocks: int, devices: int) -> list[int]:
    """How many blocks each device holds, in contiguous runs, the larger ones first."""
    return [n_blocks // devices + (i < n_blocks % devices) for i in range(devices)]


class Exchange(NamedTuple):
    """What one rank sends in one `ExchangedStage`. A row travels for each (token, block): a token
    with several blocks on one rank goes there as often, which rows without repeats would save."""

    out: float  # rows of its own tokens to blocks elsewhere
    back: float  # results of rows that came from elsewhere
    ahead: int  # bytes of the tables that go before the rows

    def forward(self, vector: int) -> float:
        """Bytes for rows of `vector` bytes; a position goes with each row out."""
        return (self.out + self.back) * vector + self.out * TABLE + self.ahead

    def backward(self, vector: int) -> float:
        return (self.out + self.back) * vector


def expected_exchange(
    layer: SplitLayer, ranks: int, held: int, tokens: float, sequences: float
) -> Exchange:
    """Of a rank that holds so many of the blocks and brings so many tokens and sequences, like
    every other rank. Rows are expected values for blocks that are chosen equally often; what is
    sent in fact depends on the router."""
    here, rows = held / layer.n_routed, tokens * layer.top_k
    ahead = TABLE * (layer.n_routed - held) * sequences + COUNT * (ranks - 1)
    return Exchange(rows * (1 - here), rows * (ranks - 1) * here, ahead)


def placed(model: LanguageModel, scheme: type["_PlacedStage"]) -> LanguageModel:
    """Replace the split stages of `model`, the same on every rank, by this rank's part of them.
    Stages whose blocks see every token (`coverage = full`) raise ValueError."""
    for i, layer in enumerate(model.layers):
        if isinstance(layer, SplitStage):
            model.layers[i] = scheme(layer)
    return model


class _PlacedStage(nn.Module):
    def __init__(self, stage: SplitStage):
        super().__init__()
        config, ranks = stage.config, world()
        if stage.full or not config.chooses:
            raise ValueError("blocks that see every token leave nothing to route between ranks")
        if config.n_routed < ranks:
            raise ValueError(f"{config.n_routed} routed blocks do not cover {ranks} ranks")
        self.held = placement(config.n_routed, ranks)
        self.first = sum(self.held[: rank()])
        self.whole = [stage]  # not a module: its routed blocks are let go of below
        self.shared, self.router, self.router_bias = stage.shared, stage.router, stage.router_bias
        with torch.device("meta"):
            mine = ThinBlocks(stage.router.shape[1], config, self.held[rank()], config.attention)
        last = self.first + self.held[rank()]
        for name, weight in list(stage.routed.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            part = nn.Parameter(weight.detach()[self.first : last].clone())
            setattr(mine.get_submodule(owner), leaf, part)
        self.routed = stage.routed = mine

    def forward(
        self, x_BTD: Tensor, rope: Rope, cache=None, start: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `SplitStage.forward`, without a cache."""
        assert cache is None
        stage = self.whole[0]
        batch, length, width = x_BTD.shape
        x_XD = x_BTD.reshape(-1, width)
        inner_XD = as_operand(x_XD, self.routed.down)
        shared_XD = stage.shared_sum(inner_XD, batch, length, rope)
        routes = stage.route(x_XD)
        y_BTD = self._routed(x_XD, inner_XD, shared_XD, routes, batch, length, rope)
        return y_BTD.view_as(x_BTD), self._balance(routes), routes.chosen_Xk.view(batch, length, -1)

    def _compute(self, rows_ND: Tensor, plan: RoutePlan, rope: Rope) -> Tensor:
        """This rank's blocks on its rows, in the order of the rows."""
        if not len(rows_ND):
            return rows_ND  # and its gradient, which other ranks wait for
        return plan.combine(self.routed(rows_ND, plan, rope))


class ExchangedStage(_PlacedStage):
    def _balance(self, routes: Routes) -> Tensor | None:
        return balance_of(routes)

    def _routed(self, x_XD, inner_XD, shared_XD, routes, batch, length, rope):
        config, device = self.whole[0].config, x_XD.device
        plan = RoutePlan.routed(routes.chosen_Xk.view(batch, length, -1), config.n_routed)
        told = [torch.tensor([batch], device=device) for _ in self.held]
        dist.all_gather(told, torch.tensor([batch], device=device))
        batches = [int(b) for b in told]

        # Rows lie by block, so those for one rank lie together; each segment's length goes ahead.
        mine = self.held[rank()]
        lengths_S = plan.cu_seqlens.diff()
        segments_out = [held * batch for held in self.held]
        theirs_S = all_to_all(lengths_S, segments_out, [mine * b for b in batches])
        sent = [int(part.sum()) for part in lengths_S.split(segments_out)]
        received = [int(part.sum()) for part in theirs_S.split([mine * b for b in batches])]
        time_N = all_to_all(plan.time_N.int(), sent, received).long()
        rows_ND = exchange(plan.gather(inner_XD), sent, received)

        # Segments come by (rank, block, sequence) and are computed by (block, rank, sequence).
        first = 0
        numbers = []
        for b in batches:
            block_e1 = torch.arange(mine, device=device)[:, None] * sum(batches)
            numbers.append((block_e1 + first + torch.arange(b, device=device)).flatten())
            first += b
        segment_N = torch.cat(numbers).repeat_interleave(theirs_S.long())
        here = RoutePlan.of_pairs(segment_N, time_N, mine, sum(batches), length)
        back_ND = exchange(self._compute(rows_ND, here, rope), received, sent)
        return self.whole[0]._compose(x_XD, shared_XD, back_ND, plan, routes.weights_Xk)


class SummedStage(_PlacedStage):
    def _balance(self, routes: Routes) -> Tensor:
        return squared_variation(routes.probability_XE.mean(0))  # every rank has all the tokens

    def _routed(self, x_XD, inner_XD, shared_XD, routes, batch, length, rope):
        stage = self.whole[0]
        inner_XD, weights_Xk = enter_all.apply(inner_XD, routes.weights_Xk)
        local_Xk = routes.chosen_Xk - self.first
        mine_Xk = (local_Xk >= 0) & (local_Xk < self.held[rank()])
        pair_N = mine_Xk.flatten().nonzero().squeeze(1)
        token_N = pair_N // stage.config.top_k
        segment_N = local_Xk.flatten()[pair_N] * batch + token_N // length
        here = RoutePlan.of_pairs(segment_N, token_N % length, self.held[rank()], batch, length)
        y_ND = self._compute(inner_XD[token_N], here, rope)
        y_PD = y_ND.new_zeros(mine_Xk.numel(), y_ND.shape[1]).index_copy(0, pair_N, y_ND)
        y_XkD = y_PD.view(*mine_Xk.shape, -1) * weights_Xk.to(y_ND.dtype)[..., None]
        total_XD = sum_parts.apply(y_XkD.sum(1))
        return added(x_XD, shared_XD, total_XD, *stage.scales)


def combine_gradients(model: nn.Module) -> None:
    """After the backward pass of a model with `ExchangedStage`s: its objective is the mean over
    ranks. Gradients of what stands everywhere are averaged; a rank's own blocks have met the
    tokens of all ranks, so theirs are divided."""
    own = {
        id(p)
        for m in model.modules()
        if isinstance(m, ExchangedStage)
        for p in m.routed.parameters()
    }
    for p in model.parameters():
        if p.grad is None:
            continue
        if id(p) not in own:
            dist.all_reduce(p.grad)
        p.grad /= world()
