"""Other ways to compute a split stage, to be timed against and compared with the one-pass stage.

A path is made for one stage, `forward = path(stage)`, and then called as the stage is:
`forward(x_BTD, rope)` gives (y, 0, routes): no gradients, so no balance loss. They share the
stage's router and composition; `mol.model.reference` is the plain code that both are tested
against.

Shape suffixes: B sequences, T positions, X = B T tokens, n tokens of one block, D = d_model,
d = d_thin, h head width, H heads, E routed blocks, k slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mol.model.attention import SoftmaxAttention
from mol.model.split_stage import Routes, SplitStage
from mol.model.thin_block import ThinBlocks
from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan, added
from mol.ops.glue import EPS

Forward = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


@contextmanager
def stages_by(model: nn.Module, path: Callable[[SplitStage], Forward]) -> Iterator[None]:
    """Inside, `model` computes its split stages by `path` (without a cache)."""
    stages = [module for module in model.modules() if isinstance(module, SplitStage)]
    for stage in stages:
        stage.forward = path(stage)
    try:
        yield
    finally:
        for stage in stages:
            del stage.forward  # uncovers the method of the class


def loop(stage: SplitStage) -> Forward:
    """2.3 as it stands: block by block, gather its tokens, run, scatter the results back.

    Each block is a launch of its own and reads its token count on the host. No gradients.
    """
    blocks = [_one_block(stage, block) for block in range(stage.config.n_routed)]

    def routed(x_XD: Tensor, weight_XE: Tensor, mine_XE: Tensor, length: int, rope: Rope) -> Tensor:
        total_XD = torch.zeros_like(x_XD)
        for block, thin_block in enumerate(blocks):
            token_n = mine_XE[:, block].nonzero()[:, 0]
            if token_n.numel() == 0:
                continue
            y_nD = thin_block(x_XD, _plan(token_n, x_XD.shape[0] // length, length), rope)
            y_nD = y_nD * weight_XE[token_n, block, None].to(y_nD.dtype)
            total_XD.index_add_(0, token_n, y_nD.to(total_XD.dtype))
        return total_XD

    return as_stage(stage, routed)


def dense_restricted(stage: SplitStage) -> Forward:
    """Every block computes every token; attention sees only the block's own, and its other
    outputs weigh nothing (2.3). Blocks are one batch and W_up is one product over all of them,
    so this is dense compute at its fastest, not a slow reference.

    Raises ValueError unless the routed blocks use softmax: a mask cannot restrict a recurrence.
    """
    blocks = stage.routed
    attention = blocks.attention
    if not isinstance(attention, SoftmaxAttention) or blocks.rank1 is not None:
        raise ValueError("dense restricted attention needs softmax blocks with a dense FFN")

    def routed(x_XD: Tensor, weight_XE: Tensor, mine_XE: Tensor, length: int, rope: Rope) -> Tensor:
        n_blocks, (n_tokens, width) = blocks.n_blocks, x_XD.shape
        h_EXd = x_XD @ blocks.down
        normed = block_norm(h_EXd, blocks.attention_norm)
        qkv = normed @ attention.qkv + attention.qkv_bias[:, None]
        q, k, v = qkv.view(n_blocks, n_tokens, 3, attention.n_heads, -1).unbind(2)
        time_X = torch.arange(length, device=x_XD.device).repeat(n_tokens // length)
        q, k = rope(q, time_X, length), rope(k, time_X, length)
        by_sequence = (t.reshape(-1, length, *t.shape[2:]).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(*by_sequence, attn_mask=_mask(mine_XE, length))
        o_EXd = o.transpose(1, 2).reshape(h_EXd.shape)
        inner = o_EXd @ attention.out + attention.out_bias[:, None]
        ffn = F.gelu(block_norm(h_EXd + inner, blocks.ffn_norm) @ blocks.ffn_in, approximate="tanh")
        z_EXd = (inner + ffn @ blocks.ffn_out) * weight_XE.t()[..., None].to(x_XD.dtype)
        return z_EXd.transpose(0, 1).reshape(n_tokens, -1) @ blocks.up.view(-1, width)

    return as_stage(stage, routed)


def as_stage(stage: SplitStage, routed: Callable[..., Tensor]) -> Forward:
    """A stage whose weighted sum over routed blocks is `routed(x, weights, mine, T, rope)`."""
    config = stage.config

    def forward(x_BTD: Tensor, rope: Rope, cache: None = None, start: int = 0):
        assert cache is None, "these paths hold no cache"
        batch, length, width = x_BTD.shape
        x_XD = x_BTD.reshape(-1, width)
        routes = stage.route(x_XD)
        weight_XE = _weights(routes, x_XD, config.n_routed)
        mine_XE = torch.ones_like(weight_XE, dtype=torch.bool) if stage.full else weight_XE > 0
        routed_XD = routed(x_XD, weight_XE, mine_XE, length, rope)
        shared_XD = stage.shared_sum(x_XD, batch, length, rope)
        y_XD = added(x_XD, shared_XD, routed_XD, *stage.scales)
        chosen = None if routes is None else routes.chosen_Xk.view(batch, length, -1)
        return y_XD.view_as(x_BTD), x_BTD.new_zeros(()), chosen

    return forward


def _weights(routes: Routes | None, x_XD: Tensor, n_routed: int) -> Tensor:
    """w of every token and block, 0 where not chosen; ones without a router."""
    if routes is None:
        return x_XD.new_ones(x_XD.shape[0], n_routed)
    return routes.spread(n_routed)


def _one_block(stage: SplitStage, block: int) -> ThinBlocks:
    """One routed block, its weights views of the stack's."""
    with torch.device("meta"):
        one = ThinBlocks(stage.routed.down.shape[1], stage.config, 1, stage.config.attention)
    for name, stacked in stage.routed.named_parameters():
        owner, _, leaf = name.rpartition(".")
        view = nn.Parameter(stacked.detach()[block : block + 1], requires_grad=False)
        setattr(one.get_submodule(owner), leaf, view)
    return one


def _plan(token_n: Tensor, batch: int, length: int) -> RoutePlan:
    """The plan of a single block that sees the tokens `token_n` (ascending)."""
    sequence_n = token_n // length
    edges = torch.arange(batch + 1, device=token_n.device) * length
    cu_seqlens = torch.searchsorted(token_n, edges)
    return RoutePlan(
        n_blocks=1,
        batch=batch,
        length=length,
        slots=1,
        equal=False,
        order_N=token_n,
        inverse_N=token_n,  # read by gradients only
        block_N=torch.zeros_like(token_n),
        within_N=torch.arange(token_n.numel(), device=token_n.device) - cu_seqlens[sequence_n],
        time_N=token_n % length,
        segment_N=sequence_n,
        offs_E=cu_seqlens[-1:].to(torch.int32),
        cu_seqlens=cu_seqlens.to(torch.int32),
    )


def block_norm(h_EXd: Tensor, weight_Ed: Tensor) -> Tensor:
    """RMSNorm of each block's rows, with the block's own weight."""
    return F.rms_norm(h_EXd, h_EXd.shape[-1:], eps=EPS) * weight_Ed[:, None]


def _mask(mine_XE: Tensor, length: int) -> Tensor:
    """[E B, 1, T, T]: a query sees the block's own tokens up to itself, and itself, so that no
    row of the softmax is empty."""
    mine_ST = mine_XE.t().reshape(-1, length)
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=mine_XE.device).tril()
    itself_TT = torch.eye(length, dtype=torch.bool, device=mine_XE.device)
    return ((mine_ST[:, None] & causal_TT) | itself_TT)[:, None]
