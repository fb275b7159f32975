"""Split stage: thin blocks side by side, routed by token, summed onto the residual (Eq. 2).

Shape suffixes: B sequences, T positions, X = B T tokens, D = d_model, E routed blocks, k slots,
N packed rows, C runs of tokens.

    stage = SplitStage(config, d_model)
    y_BTD, balance, routes_BTk = stage(x_BTD, rope)
    cache = stage.new_cache(batch, max_len)
    stage(prompt_BTD, rope, cache)                      # fills an empty cache
    stage(more_BTD, rope, cache, start=T)               # continues it at position T, or ...
    y_BD = stage.step(x_BD, rope, position, cache)      # ... one token at a time
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mol.model import fast_step
from mol.model.config import SplitLayer
from mol.model.thin_block import ThinBlocks
from mol.ops.attention import Rope
from mol.ops.collectives import mean_rows
from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import as_operand
from mol.ops.streams import aside
from mol.ops.tracing import has_kernels


@dataclass
class StageCache:
    shared: object | None
    routed: object

    def branch(self, parent_B: Tensor, batch: int) -> "StageCache":
        """A cache whose sequence i holds what sequence `parent_B[i]` of `batch` holds here."""
        shared = self.shared and self.shared.branch(parent_B, batch)
        return StageCache(shared, self.routed.branch(parent_B, batch))


# (blocks, x [X, D], plan, what the blocks' cache is) to their outputs [N, D].
Run = Callable[[ThinBlocks, Tensor, RoutePlan, object | None], Tensor]


@dataclass(frozen=True)
class Routes:
    """Softmax over the candidates, routed blocks first; the chosen and their w_i of Eq. 2; from
    the kernel also its counts of the chosen by runs of tokens, for the plan."""

    probability_XE: Tensor
    chosen_Xk: Tensor
    weights_Xk: Tensor
    counts_EC: Tensor | None = None

    def spread(self, n_routed: int) -> Tensor:
        """w of every token and routed block [X, E], 0 where not chosen."""
        weights_XE = torch.zeros_like(self.probability_XE[:, :n_routed])
        return weights_XE.scatter(1, self.chosen_Xk, self.weights_Xk)


class SplitStage(nn.Module):
    """x + combination of S shared blocks and the k best of E routed ones (Eq. 2).

    The shared blocks use softmax attention on every token. With `coverage = routed` a routed block
    sees only its own tokens, in order, at their original positions; with `full` it sees all of
    them and the routes only weigh outputs. Options of Eq. 2 (`SplitLayer`), with P the softmax over
    the E candidates, TB a thin block:

    - `weights_over`: w = P renormalized over the chosen k (`selected`), or P as it is (`all`).
    - `divide_by_k` with `shared_weight = in_mean`: x + (sum_shared TB + sum_chosen w TB) / (S + k);
      with `unit`: x + sum_shared TB + sum_chosen w TB / k. Without `divide_by_k` nothing is
      divided, and the two agree.
    - `router`: scores are those of a matrix with a row for each candidate (`linear`), with a bias
      beside it (`bias`), or with rows for the shared blocks too (`every_block`): P and the balance
      loss are then over all S + E, and the k are chosen among the routed ones all the same.
    - `router = none`: the uniform composition of 2.2. Every block weighs 1 / E, before the sum or
      as the divisor, so `weights_over` has no say.
    """

    def __init__(self, config: SplitLayer, d_model: int):
        super().__init__()
        self.config = config
        n_routed = config.n_routed
        self.shared = (
            ThinBlocks(d_model, config, config.n_shared, "softmax") if config.n_shared else None
        )
        self.routed = ThinBlocks(d_model, config, n_routed, config.attention)
        rows = config.n_blocks if config.router == "every_block" else n_routed
        self.router = nn.Parameter(torch.empty(rows, d_model)) if config.chooses else None
        self.router_bias = nn.Parameter(torch.empty(rows)) if config.router == "bias" else None
        # Blocks that every token chooses see every token, whatever the coverage.
        self.full = config.coverage == "full" or config.top_k == n_routed
        if not self.routed.down.is_meta:
            self.init_weights()

    def init_weights(self, std: float = 0.02, residual_std: float = 0.02) -> None:
        """Initialize everything inside the stage; see `ThinBlocks.init_weights`."""
        for blocks in filter(None, (self.shared, self.routed)):
            blocks.init_weights(std, residual_std)
        if self.router is not None:
            nn.init.normal_(self.router, std=std)
        if self.router_bias is not None:
            nn.init.zeros_(self.router_bias)

    def forward(
        self, x_BTD: Tensor, rope: Rope, cache: StageCache | None = None, start: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(y [B, T, D], CV^2 balance loss (0-dim, 0 without router, None without gradients), routes
        [B, T, k] or None)."""
        batch, length, width = x_BTD.shape

        def run(blocks: ThinBlocks, x_XD: Tensor, plan: RoutePlan, held: object | None) -> Tensor:
            return blocks(x_XD, plan, rope, held, start)

        y_XD, routes = self._sum(run, x_BTD.reshape(-1, width), batch, length, cache)
        y_BTD = y_XD.view_as(x_BTD)
        if routes is None:
            return y_BTD, x_BTD.new_zeros((), dtype=torch.float32), None
        routes_BTk = routes.chosen_Xk.view(batch, length, -1)
        return y_BTD, balance_of(routes), routes_BTk

    def _sum(
        self, run: Run, x_XD: Tensor, batch: int, length: int, cache: StageCache | None
    ) -> tuple[Tensor, Routes | None]:
        """Eq. 2 with blocks that `run` computes, on CUDA the shared ones beside the routed."""
        held = cache or StageCache(None, None)
        inner_XD = as_operand(x_XD, self.routed.down)
        every = self._every(batch, length, x_XD.device)
        shared_XD = None
        with aside(inner_XD) as beside:
            if every is not None:
                shared_XD = every.combine(run(self.shared, inner_XD, every, held.shared))
        routes = self.route(x_XD)
        plan, weights = self._plan(routes, batch, length, x_XD.device)
        routed_ND = run(self.routed, inner_XD, plan, held.routed)
        beside.join()
        return self._compose(x_XD, shared_XD, routed_ND, plan, weights), routes

    def _every(self, batch: int, length: int, device: torch.device) -> RoutePlan | None:
        """The shared blocks' plan. Plans are kept, and so made before any stream parts."""
        if self.shared is None:
            return None
        return RoutePlan.full(self.config.n_shared, batch, length, device)

    def shared_sum(self, x_XD: Tensor, batch: int, length: int, rope: Rope) -> Tensor | None:
        """What the shared blocks add up to, before it is scaled; None without any."""
        plan = self._every(batch, length, x_XD.device)
        return None if plan is None else plan.combine(self.shared(x_XD, plan, rope))

    def new_cache(self, batch: int, max_len: int) -> StageCache:
        shared = self.shared and self.shared.new_cache(batch, max_len)
        return StageCache(shared, self.routed.new_cache(batch, max_len))

    def step(self, x_BD: Tensor, rope: Rope, position: int | Tensor, cache: StageCache) -> Tensor:
        """One token a sequence, all at `position`; computes only the chosen blocks, [B, D]."""
        if fast_step.takes_stage(self, x_BD):
            return fast_step.stage_step(self, x_BD, rope, position, cache)
        return self.plain_step(x_BD, rope, position, cache)

    def steps_in_kernels(self, x_BD: Tensor) -> bool:
        """Whether a step on `x_BD` is a chain of the project's kernels, which need no compiler."""
        return fast_step.takes_stage(self, x_BD) or fast_step.shares_reads(self, x_BD)

    def plain_step(
        self, x_BD: Tensor, rope: Rope, position: int | Tensor, cache: StageCache
    ) -> Tensor:
        """`step` as the layers' modules compute it: the fused step's reference, and what many rows
        take, since the modules' products read a block's matrices once for all its rows."""

        def run(blocks: ThinBlocks, x_BD: Tensor, plan: RoutePlan, held: object | None) -> Tensor:
            return blocks.step(x_BD, plan, rope, position, held)

        return self._sum(run, x_BD, x_BD.shape[0], 1, cache)[0]

    def inactive_parameters(self) -> int:
        """Weights of the routed blocks that a token leaves out."""
        idle = self.config.n_routed - self.config.top_k
        return sum(p.numel() for p in self.routed.parameters()) // self.config.n_routed * idle

    def route(self, x_XD: Tensor) -> Routes | None:
        """Scores in fp32 at least, also inside autocast: rounded scores would tie."""
        if self.router is None:
            return None
        over_selected = self.config.weights_over == "selected"
        if has_kernels(x_XD) and self.config.router == "linear":
            from mol.ops.kernels.route import route

            probability_XE, weights_Xk, chosen_Xk, counts_EC = route(
                x_XD, self.router, self.config.top_k, over_selected
            )
            return Routes(probability_XE, chosen_Xk, weights_Xk, counts_EC)
        wide = torch.promote_types(self.router.dtype, torch.float32)
        with torch.autocast(x_XD.device.type, enabled=False):
            bias_E = None if self.router_bias is None else self.router_bias.to(wide)
            scores_XE = F.linear(x_XD.to(wide), self.router.to(wide), bias_E)
            probability_XE = scores_XE.softmax(-1)
        routed_XE = probability_XE[:, : self.config.n_routed]
        weights_Xk, chosen_Xk = routed_XE.topk(self.config.top_k, -1)
        if over_selected:
            weights_Xk = weights_Xk / weights_Xk.sum(-1, keepdim=True)
        return Routes(probability_XE, chosen_Xk, weights_Xk)

    def _plan(
        self, routes: Routes | None, batch: int, length: int, device: torch.device
    ) -> tuple[RoutePlan, Tensor | None]:
        """The packed order and the weight of each (token, slot); None: all equal."""
        n_routed = self.config.n_routed
        if not self.full:
            chosen_BTk = routes.chosen_Xk.view(batch, length, -1)
            plan = RoutePlan.routed(chosen_BTk, n_routed, routes.counts_EC)
            return plan, routes.weights_Xk
        plan = RoutePlan.full(n_routed, batch, length, device)
        return plan, None if routes is None else routes.spread(n_routed)

    def _compose(
        self,
        x_XD: Tensor,
        shared_XD: Tensor | None,
        routed_ND: Tensor,
        plan: RoutePlan,
        weights: Tensor | None,
    ) -> Tensor:
        """The right side of Eq. 2 by the stage's options."""
        return plan.compose(x_XD, shared_XD, routed_ND, weights, *self.scales)

    @property
    def scales(self) -> tuple[float, float]:
        """What the sum over shared blocks and that over routed ones are multiplied by."""
        config = self.config
        if config.divide_by_k and config.shared_weight == "in_mean":
            return (1 / (config.n_shared + config.top_k),) * 2
        divided = config.divide_by_k or self.router is None
        return 1.0, 1 / config.top_k if divided else 1.0


def balance_of(routes: Routes) -> Tensor | None:
    """The balance loss of a forward pass that can be trained on, otherwise None: only training
    reads it, and its small kernels are a fifth of a short prompt's launches."""
    return balance_loss(routes.probability_XE) if torch.is_grad_enabled() else None


def balance_loss(probability_XE: Tensor) -> Tensor:
    """CV^2 of the blocks' mean probability over the whole batch, of all ranks (2.2)."""
    return squared_variation(mean_rows(probability_XE))


def squared_variation(mean_E: Tensor) -> Tensor:
    """CV^2, the population variance over the squared mean."""
    return mean_E.var(correction=0) / mean_E.mean().square()
