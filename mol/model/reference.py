"""The split stage written straight from Equations 1 and 2: a loop over blocks and sequences.

It reads the parameters of a `SplitStage` and shares none of its code paths beyond the rotary table
and, for rank-1 mixtures, their own reference. Slow; for tests, the self-check and 2.3.

Shape suffixes: B sequences, T positions, D = d_model, d = d_thin, H heads, n rows of one segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.model.delta import GatedDeltaNet
from mol.model.rank1 import Rank1Mixture, reference_rank1
from mol.model.split_stage import SplitStage
from mol.model.thin_block import ThinBlocks
from mol.ops.attention import Rope
from mol.ops.gated_delta import naive_gated_delta_rule
from mol.ops.glue import EPS


def reference_stage(
    stage: SplitStage, x_BTD: Tensor, rope: Rope, dense_restricted: bool = False
) -> Tensor:
    """y [B, T, D] of Eq. 2, block by block.

    `dense_restricted` (softmax routed blocks only): every routed block computes on all tokens, its
    attention masked to the tokens routed to it, and its outputs are dropped elsewhere (2.3).
    """
    return torch.stack([_sequence(stage, x_TD, rope, dense_restricted) for x_TD in x_BTD.unbind(0)])


def reference_balance(stage: SplitStage, x_BTD: Tensor) -> Tensor:
    """CV^2 of the mean softmax probability of each block, over all tokens."""
    probability = _scores(stage, x_BTD.flatten(0, 1)).softmax(-1)
    means = [probability[:, block].mean() for block in range(probability.shape[1])]
    mean = sum(means) / len(means)
    return sum((m - mean) ** 2 for m in means) / len(means) / mean**2


def _sequence(stage: SplitStage, x_TD: Tensor, rope: Rope, dense_restricted: bool) -> Tensor:
    config = stage.config
    every = torch.ones(x_TD.shape[0], dtype=torch.bool, device=x_TD.device)
    shared = torch.zeros_like(x_TD)
    for block in range(config.n_shared):
        shared = shared + _thin_block(stage.shared, block, x_TD, every, rope)
    routed = torch.zeros_like(x_TD)
    weights_TE = _weights(stage, x_TD)
    for block in range(config.n_routed):
        mine = every if config.coverage == "full" else weights_TE[:, block] != 0
        if dense_restricted:
            output = _thin_block(stage.routed, block, x_TD, every, rope, restrict_to=mine)
            output = torch.where(mine[:, None], output, 0)
        else:
            output = _thin_block(stage.routed, block, x_TD, mine, rope)
        routed = routed + weights_TE[:, block, None] * output
    members = config.n_shared + config.top_k
    if stage.router is None:
        # Uniform composition: the mean of all, or the shared sum plus the mean of the routed.
        if config.divide_by_k and config.shared_weight == "in_mean":
            return x_TD + (shared + routed) / members
        return x_TD + shared + routed / config.top_k
    if not config.divide_by_k:
        return x_TD + shared + routed
    if config.shared_weight == "in_mean":
        return x_TD + (shared + routed) / members
    return x_TD + shared + routed / config.top_k


def _weights(stage: SplitStage, x_TD: Tensor) -> Tensor:
    """w_i of every token and routed block, zero where not chosen; ones without a router."""
    config = stage.config
    weights_TE = x_TD.new_zeros(x_TD.shape[0], config.n_routed)
    if stage.router is None:
        return weights_TE + 1
    rows = []
    for row, x_D in zip(weights_TE, x_TD, strict=True):
        probability = torch.softmax(_scores(stage, x_D), 0)[: config.n_routed]
        chosen = probability.topk(config.top_k).indices
        weight = probability[chosen]
        if config.weights_over == "selected":
            weight = weight / weight.sum()
        rows.append(row.index_copy(0, chosen, weight))
    return torch.stack(rows)


def _scores(stage: SplitStage, x: Tensor) -> Tensor:
    scores = x @ stage.router.t()
    return scores if stage.router_bias is None else scores + stage.router_bias


def _thin_block(
    blocks: ThinBlocks,
    block: int,
    x_TD: Tensor,
    visible_T: Tensor,
    rope: Rope,
    restrict_to: Tensor | None = None,
) -> Tensor:
    """W_up (Block(W_down x) - W_down x) of the visible tokens; zero rows elsewhere, [T, D]."""
    time_n = visible_T.nonzero()[:, 0]
    if time_n.numel() == 0:
        return torch.zeros_like(x_TD)
    h = x_TD[time_n] @ blocks.down[block]
    normed = F.rms_norm(h, h.shape[-1:], blocks.attention_norm[block], EPS)
    if isinstance(blocks.attention, GatedDeltaNet):
        assert restrict_to is None, "a mask cannot restrict a recurrence"
        inner = h + _delta(blocks.attention, block, normed)
    else:
        inner = h + _softmax(blocks.attention, block, normed, time_n, rope, restrict_to)
    normed = F.rms_norm(inner, h.shape[-1:], blocks.ffn_norm[block], EPS)
    if blocks.rank1 is None:
        ffn = F.gelu(normed @ blocks.ffn_in[block], approximate="tanh") @ blocks.ffn_out[block]
    else:
        ffn = reference_rank1(_one_mixture(blocks.rank1, block, normed.shape[-1]), normed)
    output = (inner + ffn - h) @ blocks.up[block]
    return torch.zeros_like(x_TD).index_copy(0, time_n, output)


def _softmax(
    attention, block: int, x_nd: Tensor, time_n: Tensor, rope: Rope, restrict_to: Tensor | None
) -> Tensor:
    n, heads = x_nd.shape[0], attention.n_heads
    qkv = x_nd @ attention.qkv[block] + attention.qkv_bias[block]
    q, k, v = (t.view(n, heads, -1) for t in qkv.chunk(3, -1))
    longest = int(time_n.max()) + 1
    q, k = rope(q, time_n, longest), rope(k, time_n, longest)
    seen_nn = time_n[:, None] >= time_n
    if restrict_to is not None:
        # A row that is not routed here still needs something to attend to: itself.
        seen_nn = seen_nn & (restrict_to | torch.eye(n, dtype=torch.bool, device=x_nd.device))
    scores_Hnn = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    probability_Hnn = scores_Hnn.masked_fill(~seen_nn, -torch.inf).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", probability_Hnn, v).reshape(n, -1)
    return mixed @ attention.out[block] + attention.out_bias[block]


def _delta(layer: GatedDeltaNet, block: int, x_nd: Tensor) -> Tensor:
    n, width, heads = x_nd.shape[0], x_nd.shape[1], layer.n_heads
    qkv, gate, a, b = (x_nd @ layer.qkvg_ab[block]).split([3 * width, width, heads, heads], -1)
    filters = layer.filters[block]
    padded = F.pad(qkv.t(), (filters.shape[1] - 1, 0))
    qkv = F.silu(F.conv1d(padded, filters[:, None], groups=3 * width).t())
    q, k, v = (t.reshape(n, heads, -1) for t in qkv.chunk(3, -1))
    decay = -layer.decay_log[block].exp() * F.softplus(a + layer.dt_bias[block])
    ends = torch.tensor([0, n])
    o, _ = naive_gated_delta_rule(q, k, v, decay, torch.sigmoid(b), ends)
    o = F.rms_norm(o, o.shape[-1:], layer.norm[block], 1e-5).reshape(n, width)
    return (o * F.silu(gate)) @ layer.out[block]


def _one_mixture(stacked: Rank1Mixture, block: int, width: int) -> Rank1Mixture:
    """The mixture of one block with views of the stacked weights."""
    with torch.device("meta"):
        one = Rank1Mixture(width, stacked.config)
    for name, weight in stacked.named_parameters():
        owner = one.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        del owner._parameters[leaf]
        setattr(owner, leaf, weight[block])
    return one
