"""What stands between the products of a block: one kernel each on CUDA, PyTorch elsewhere.

The PyTorch side is what the kernels are compared with by `mol selfcheck`, and all that fp64 runs.

Shape suffixes: N packed rows, E blocks, M width of a block, D of the model, H heads, d = M / H,
C = 3 M channels (q, k, v), J taps, G = 2 H rates (a, b), P = 3 M projected columns, S segments,
Z = C + M + G columns (q, k, v, gate, a, b).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops.attention import Rope
from mol.ops.dispatch import RoutePlan
from mol.ops.gated_delta import (
    WIDEST_HEAD,
    fuses_norm,
    gated_delta_rule,
    gated_delta_step,
    normed_gated_delta_rule,
)
from mol.ops.short_conv import short_conv
from mol.ops.tracing import has_kernels, untraced

EPS = 1e-5


def norm(h_NM: Tensor, weight_EM: Tensor, plan: RoutePlan) -> Tensor:
    """RMSNorm(h) times the weight of the row's block."""
    if has_kernels(h_NM):
        from mol.ops.kernels import norm as kernels

        return kernels.norm(h_NM, weight_EM, plan.offs_E, EPS)
    normed_NM = F.rms_norm(h_NM, h_NM.shape[-1:], eps=EPS).to(h_NM.dtype)
    return normed_NM * plan.expand(weight_EM.to(h_NM.dtype))


def add_norm(
    h_NM: Tensor, a_NM: Tensor, bias_EM: Tensor | None, weight_EM: Tensor, plan: RoutePlan
) -> tuple[Tensor, Tensor]:
    """(a + bias, norm(h + a + bias)), bias and weight those of the row's block."""
    if has_kernels(h_NM):
        from mol.ops.kernels import norm as kernels

        return kernels.add_norm(h_NM, a_NM, bias_EM, weight_EM, plan.offs_E, EPS)
    if bias_EM is not None:
        a_NM = a_NM + plan.expand(bias_EM.to(a_NM.dtype))
    return a_NM, norm(h_NM + a_NM, weight_EM, plan)


def add_layer_norm(
    x: Tensor,
    a: Tensor | None,
    bias_1D: Tensor | None,
    weight_D: Tensor,
    shift_D: Tensor | None,
    multiplied: bool,
) -> tuple[Tensor, Tensor]:
    """(x' = x + a + bias, norm(x')) at full width, [..., D]: LayerNorm, or RMSNorm without a shift.

    The norm comes in x's precision, or, if it is only `multiplied`, in that of the product: inside
    autocast it is rounded once, by the kernel, rather than by each product. Without `a` there is
    nothing to add, nor a bias.
    """
    dtype = x.dtype if a is None else torch.promote_types(x.dtype, a.dtype)
    x, kind = x.to(dtype), x.device.type
    if multiplied and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    # A compiler fuses all of this with what stands around it, but not the backward pass.
    if has_kernels(x) and (torch.is_grad_enabled() or not torch.compiler.is_compiling()):
        from mol.ops.kernels import layer_norm as kernels

        return kernels.add_layer_norm(x, a, bias_1D, weight_D, shift_D, dtype, EPS)
    if bias_1D is not None:
        a = a + bias_1D.to(a.dtype)
    if a is not None:
        x = x + a
    if shift_D is None:
        return x, F.rms_norm(x, weight_D.shape, weight_D, EPS).to(dtype)
    return x, F.layer_norm(x, weight_D.shape, weight_D, shift_D, EPS).to(dtype)


def biased_heads(
    qkv_NP: Tensor,
    bias_EP: Tensor,
    heads: int,
    rope: Rope,
    plan: RoutePlan,
    start: int | Tensor,
    end: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [N, H, d] with their block's bias, q and k rotated to `start` + the rows' times, all
    below `end`. For a plan of length 1 `start` may be on the device, int64 [1] or [N]."""
    if has_kernels(qkv_NP):
        from mol.ops.kernels.rope import bias_rope

        tables = rope.tables(end, qkv_NP.device, torch.float32)
        if isinstance(start, int):
            tables, time_N = [t[start:] for t in tables], plan.time_N
        else:  # the rows' times are 0
            time_N = start.expand(qkv_NP.shape[0])
        return bias_rope(qkv_NP, bias_EP, *tables, time_N, plan.offs_E)
    qkv_NP = qkv_NP + plan.expand(bias_EP.to(qkv_NP.dtype))
    q, k, v = qkv_NP.view(qkv_NP.shape[0], 3, heads, -1).unbind(1)
    time_N = plan.time_N + start
    return rope(q, time_N, end), rope(k, time_N, end), v


def delta_inputs(
    qkv_NC: Tensor,
    ab_NG: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    plan: RoutePlan,
    before_NC: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], bool]:
    """((q, k, v [N, H, d], log decay g and step beta [N, H]), whether q and k are unit vectors).

    q, k, v are SiLU of the causal convolution inside the segment, plus `before`, the part of what
    stood before it; g = -exp(decay_log) softplus(a + dt_bias), beta = sigmoid(b).
    """
    heads = decay_log_EH.shape[1]
    if has_kernels(qkv_NC) and before_NC is None:
        from mol.ops.kernels import mix

        weights = filters_ECJ, decay_log_EH, dt_bias_EH
        index = plan.within_N, plan.offs_E, plan.cu_seqlens
        return mix.delta_inputs(qkv_NC, ab_NG, *weights, *index), True
    mixed_NC = short_conv(qkv_NC, filters_ECJ.to(qkv_NC.dtype), plan)
    if before_NC is not None:
        mixed_NC = mixed_NC + before_NC
    q, k, v = F.silu(mixed_NC).view(mixed_NC.shape[0], 3, heads, -1).unbind(1)
    return (q, k, v, *rates(ab_NG, decay_log_EH, dt_bias_EH, plan)), False


def rates(
    ab_NG: Tensor, decay_log_EH: Tensor, dt_bias_EH: Tensor, plan: RoutePlan
) -> tuple[Tensor, Tensor]:
    """Log decay and step size, fp32 at least: the decay is summed over whole segments."""
    a_NH, b_NH = ab_NG.chunk(2, -1)
    wide = torch.promote_types(a_NH.dtype, torch.float32)
    rate_NH = plan.expand(decay_log_EH.to(wide)).exp()
    bias_NH = plan.expand(dt_bias_EH.to(wide))
    return -rate_NH * F.softplus(a_NH.to(wide) + bias_NH), b_NH.sigmoid()


def gated_norm(o_NHd: Tensor, gate_NM: Tensor, weight_Ed: Tensor, plan: RoutePlan) -> Tensor:
    """RMSNorm(o) per head times the block's weight, times SiLU(gate), [N, M]."""
    if has_kernels(gate_NM):
        from mol.ops.kernels import mix

        return mix.gated_norm(o_NHd, gate_NM, weight_Ed, plan.offs_E, EPS)
    normed_NHd = F.rms_norm(o_NHd, o_NHd.shape[-1:], eps=EPS).to(gate_NM.dtype)
    scaled_NHd = normed_NHd * plan.expand(weight_Ed.to(normed_NHd.dtype))[:, None]
    return scaled_NHd.reshape(gate_NM.shape) * F.silu(gate_NM)


def gated_delta(
    inputs: tuple[Tensor, ...],
    unit: bool,
    gate_NM: Tensor,
    weight_Ed: Tensor,
    plan: RoutePlan,
    state_SHdd: Tensor | None = None,
    final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`gated_norm` of the outputs of the gated delta rule on what `delta_inputs` gives, [N, M],
    and, if asked, the last state of each segment."""
    states = state_SHdd, final_state
    if fuses_norm(inputs[0], inputs[2]):
        normed = gate_NM, weight_Ed, EPS
        return normed_gated_delta_rule(inputs, plan.cu_seqlens, *states, unit, *normed)
    o_NHd, state = gated_delta_rule(*inputs, plan.cu_seqlens, *states, unit=unit)
    return gated_norm(o_NHd, gate_NM, weight_Ed, plan), state


@untraced
def delta_step(
    z_NZ: Tensor,
    filters_ECJ: Tensor,
    decay_log_EH: Tensor,
    dt_bias_EH: Tensor,
    norm_Ed: Tensor,
    tail_SJC: Tensor,
    state_SHdd: Tensor,
    plan: RoutePlan,
) -> Tensor:
    """Convolution, gated delta rule and gated norm for one new row of each segment of `plan`, of
    length 1: [N, M], and the segments' last rows and states move on. No gradients.

    Untraced, as `mol.ops.attention.step_in_cache`, whose reasons are the same.
    """
    segment_N, heads = plan.segment_N, state_SHdd.shape[1]
    if has_kernels(z_NZ) and state_SHdd.shape[-1] <= WIDEST_HEAD:
        from mol.ops.kernels import delta_step as kernels

        weights = filters_ECJ, decay_log_EH, dt_bias_EH, norm_Ed
        held = tail_SJC, state_SHdd, segment_N, plan.block_N
        return kernels.delta_step(z_NZ, *weights, *held, EPS)
    width = norm_Ed.shape[1] * heads
    qkv_NC, gate_NM, ab_NG = z_NZ.split([3 * width, width, 2 * heads], -1)
    window_NJC = torch.cat([tail_SJC[segment_N], qkv_NC[:, None]], 1)
    tail_SJC[segment_N] = window_NJC[:, 1:]
    filters_NCJ = filters_ECJ.to(qkv_NC.dtype)[plan.block_N]
    mixed_NC = F.silu(torch.einsum("njc,ncj->nc", window_NJC, filters_NCJ))
    q, k, v = mixed_NC.view(mixed_NC.shape[0], 3, heads, -1).unbind(1)
    g, beta = rates(ab_NG, decay_log_EH, dt_bias_EH, plan)
    o_NHd, state = gated_delta_step(q, k, v, g, beta, state_SHdd[segment_N])
    state_SHdd[segment_N] = state
    return gated_norm(o_NHd, gate_NM, norm_Ed, plan)
