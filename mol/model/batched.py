"""The paper's `batched_sparse` (5.6): routed blocks side by side as further heads of one call.

Each block's tokens are gathered and padded to the longest segment, projections are batched products
over blocks, and the recurrence (or attention) is one call on E x H heads. The padding stands
behind a segment's tokens, where causality hides it. The longest segment is read on the host. No
gradients.

Shape suffixes: B sequences, T positions, X = B T tokens, E routed blocks, L longest segment,
R = B L padded rows of a block, D = d_model, d = d_thin, H heads, h head width, C = 3 d.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.model.attention import SoftmaxAttention
from mol.model.delta import TAPS, GatedDeltaNet
from mol.model.paths import Forward, as_stage, block_norm
from mol.model.split_stage import SplitStage
from mol.ops.attention import Rope
from mol.ops.gated_delta import gated_delta_rule
from mol.ops.glue import EPS


def batched(stage: SplitStage) -> Forward:
    """`forward(x_BTD, rope)` of the stage by this path. Raises ValueError for blocks that hold a
    rank-1 mixture, which no routed block of the paper does."""
    blocks = stage.routed
    if blocks.rank1 is not None:
        raise ValueError("the batched path needs blocks with a dense FFN")
    softmax = isinstance(blocks.attention, SoftmaxAttention)

    def routed(x_XD: Tensor, weight_XE: Tensor, mine_XE: Tensor, length: int, rope: Rope) -> Tensor:
        token_ER, time_EBL, used_EBL = _padded(mine_XE, length)
        h_ERd = torch.bmm(x_XD[token_ER], blocks.down)
        normed_ERd = block_norm(h_ERd, blocks.attention_norm)
        if softmax:
            inner_ERd = _softmax(blocks.attention, normed_ERd, time_EBL, length, rope)
        else:
            inner_ERd = _delta(blocks.attention, normed_ERd, time_EBL.shape[1])
        ffn_ERd = block_norm(h_ERd + inner_ERd, blocks.ffn_norm)
        ffn_ERd = torch.bmm(
            F.gelu(torch.bmm(ffn_ERd, blocks.ffn_in), approximate="tanh"), blocks.ffn_out
        )
        y_ERD = torch.bmm(inner_ERd + ffn_ERd, blocks.up)
        weight_ER = weight_XE.t().gather(1, token_ER) * used_EBL.flatten(1)
        y_ERD = y_ERD * weight_ER[..., None].to(y_ERD.dtype)
        return torch.zeros_like(x_XD).index_add_(
            0, token_ER.flatten(), y_ERD.flatten(0, 1).to(x_XD.dtype)
        )

    return as_stage(stage, routed)


def _padded(mine_XE: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each block and sequence, its tokens in order and then others up to the longest segment:
    their numbers [E, R], their positions and which of them are the block's own [E, B, L]."""
    mine_EBT = mine_XE.t().unflatten(1, (-1, length))
    longest = max(1, int(mine_EBT.sum(-1).max()))
    own_first = torch.sort(mine_EBT, dim=-1, descending=True, stable=True)
    used_EBL, time_EBL = (t[..., :longest] for t in own_first)
    start_B = torch.arange(mine_EBT.shape[1], device=mine_XE.device) * length
    return (start_B[:, None] + time_EBL).flatten(1), time_EBL, used_EBL


def _softmax(
    attention: SoftmaxAttention, x_ERd: Tensor, time_EBL: Tensor, length: int, rope: Rope
) -> Tensor:
    heads, longest = attention.n_heads, time_EBL.shape[-1]
    qkv = torch.bmm(x_ERd, attention.qkv) + attention.qkv_bias[:, None]
    q, k, v = qkv.view(*x_ERd.shape[:2], 3, heads, -1).unbind(2)
    time_ER = time_EBL.flatten(1)
    q, k = rope(q, time_ER, length), rope(k, time_ER, length)
    by_segment = (t.reshape(-1, longest, *t.shape[2:]).transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(*by_segment, is_causal=True)
    o_ERd = o.transpose(1, 2).reshape(x_ERd.shape)
    return torch.bmm(o_ERd, attention.out) + attention.out_bias[:, None]


def _delta(attention: GatedDeltaNet, x_ERd: Tensor, batch: int) -> Tensor:
    n_blocks, n_rows, width = x_ERd.shape
    heads = attention.n_heads
    z = torch.bmm(x_ERd, attention.qkvg_ab)
    qkv_ERC, gate_ERd, a_ERH, b_ERH = z.split([3 * width, width, heads, heads], -1)
    mixed_ERC = F.silu(_conv(qkv_ERC, attention.filters, batch))

    def as_heads(t: Tensor) -> Tensor:
        """[E, R, H ...] to rows of E x H heads, [R, E H ...]."""
        return t.transpose(0, 1).reshape(n_rows, n_blocks * heads, *t.shape[3:])

    q, k, v = (as_heads(t) for t in mixed_ERC.unflatten(-1, (3, heads, -1)).unbind(2))
    wide = torch.promote_types(x_ERd.dtype, torch.float32)
    rate_E1H = attention.decay_log.to(wide).exp()[:, None]
    g_ERH = -rate_E1H * F.softplus(a_ERH.to(wide) + attention.dt_bias.to(wide)[:, None])
    step = n_rows // batch
    cu_seqlens = torch.arange(batch + 1, device=x_ERd.device, dtype=torch.int32) * step
    o, _ = gated_delta_rule(q, k, v, as_heads(g_ERH), as_heads(b_ERH.sigmoid()), cu_seqlens)
    o_ERHh = o.view(n_rows, n_blocks, heads, -1).transpose(0, 1)
    normed = F.rms_norm(o_ERHh, o_ERHh.shape[-1:], eps=EPS) * attention.norm[:, None, None]
    return torch.bmm(normed.reshape(x_ERd.shape) * F.silu(gate_ERd), attention.out)


def _conv(x_ERC: Tensor, filters_ECJ: Tensor, batch: int) -> Tensor:
    """Causal depthwise convolution of each padded segment, as a sum of shifted rows."""
    x_EBLC = x_ERC.unflatten(1, (batch, -1))
    padded = F.pad(x_EBLC, (0, 0, TAPS - 1, 0))
    steps = x_EBLC.shape[2]
    taps = (
        padded[:, :, tap : tap + steps] * filters_ECJ[:, None, None, :, tap] for tap in range(TAPS)
    )
    return sum(taps).flatten(1, 2)
