"""Backward pass of the chunked gated delta rule: two kernels, gradients of all six inputs.

With the names of `mol.ops.kernels.delta`, y_i = exp(G_i), z_i = exp(G_C - G_i), c = d^-0.5,
D_ij = exp(G_i - G_j) where i >= j, else 0, a dot before a name for a gradient, S the state before
a chunk and S' the one after it, the rows of a chunk satisfy

    (I + A) V' = diag(beta) (V - diag(y) K S)  =:  R

`_states_backward` goes through each segment from its last chunk to its first:

    .V' = c (Q K^T * D)^T .O + diag(z) K .S'
    .R  = T^T .V'
    .S  = exp(G_C) .S' + c Q^T diag(y) .O - K^T diag(beta y) .R

and keeps .R and .S'. As .A = -tril(.R V'^T, -1) and the gradients of W and U need not be formed,
`_rows_backward` has all the rest for each chunk on its own:

    P = .O V'^T * D        M = -tril(.R V'^T * D, -1)        B = M K - diag(y) .R S^T
    .Q = c (diag(y) .O S^T + P K)
    .K = c P^T Q + diag(z) V' .S'^T + M^T diag(beta) K + diag(beta) B
    .V = diag(beta) .R
    .beta_i = k_i . B_i + v_i . .R_i
    .G_i = q_i . .q_i - k_i . .k_i + 2 beta_i k_i . B_i
    .g_i = sum_{j >= i} .G_j + sum_j z_j k_j . (.S' v'_j) + exp(G_C) <S, .S'>

where the first line of .G holds because G_i scales row i of Q with y and D, and undoes the scale of
row i of K everywhere but in A's rows and in the term with y, whose sign is the other.

Saved are T, V' and S (three times the bytes of v at d = e = 64) and G; U, W and A are not needed,
and the scores are worked out again. Transposed factors are made by transposing what was
loaded, or by a product of their own: Triton 3.4 to 3.7 on Hopper gives wrong results where a
product's result is transposed in registers and then is the first factor of another.

Bytes a row and head in vectors of 64 values: `_states_backward` 6 (q, k, T, .O; .R, .S'),
`_rows_backward` 11 (q, k, v, .O, V', .R, S, .S'; .Q, .K, .V).

Shape suffixes as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.delta_solve import (
    CHUNK,
    chain_launch,
    find_chunk,
    flip_rows,
    load_rows,
    load_scalars,
    load_sums,
    shapes,
    state_at,
    store_rows,
    store_scalars,
)


@triton.jit
def _states_backward(
    q, k, beta, t, decay, grad_o, grad_final, cu_seqlens, grad_r, grad_states, grad_initial, scale,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, HAS_FINAL: tl.constexpr,
    WANTS_INITIAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of the gradient of one segment's and head's state, from its last chunk back."""
    first = tl.program_id(0) % tl.cdiv(E, COLUMNS) * COLUMNS
    head = tl.program_id(0) // tl.cdiv(E, COLUMNS) % HEADS
    segment = tl.program_id(0) // (tl.cdiv(E, COLUMNS) * HEADS)
    start = tl.load(cu_seqlens + segment).to(tl.int64)
    end = tl.load(cu_seqlens + segment + 1).to(tl.int64)
    chunks = tl.cdiv(end - start, 64)
    last_slot = start // 64 + segment + chunks - 1
    at, mask = state_at(segment.to(tl.int64), head, first, D, E, HEADS, D_WIDE, COLUMNS)
    if HAS_FINAL:
        grad = tl.load(grad_final + at, mask, other=0.0).to(tl.float32)
    else:
        grad = tl.zeros([D_WIDE, COLUMNS], tl.float32)
    later = tl.arange(0, 64)[:, None] <= tl.arange(0, 64)[None, :]
    for back in tl.range(0, chunks, num_stages=STAGES):
        row = start + (chunks - 1 - back) * 64
        q_c = load_rows(q, row, end, head, HEADS, D, 64, D_WIDE)
        k_c = load_rows(k, row, end, head, HEADS, D, 64, D_WIDE)
        t_c = load_rows(t, row, end, head, HEADS, 64, 64, 64)
        grad_c = load_rows(grad_o, row, end, head, HEADS, E, 64, COLUMNS, first)
        step = load_scalars(beta, row, end, head, HEADS, 64)
        sums, last = load_sums(decay, row, end, head, HEADS)
        chunk_at, _ = state_at(last_slot - back, head, first, D, E, HEADS, D_WIDE, COLUMNS)
        narrow = grad.to(k_c.dtype)
        tl.store(grad_states + chunk_at, narrow, mask)
        # Row j, column i: what key j gave to query i.
        ratio = tl.exp(tl.where(later, sums[None, :] - sums[:, None], -float("inf")))
        scores = tl.dot(k_c, tl.trans(q_c), input_precision=PRECISION) * ratio
        grad_v = tl.dot(scores.to(k_c.dtype), grad_c, input_precision=PRECISION) * scale
        grown = tl.dot(k_c, narrow, input_precision=PRECISION)
        grad_v += grown * tl.exp(last - sums)[:, None]
        t_t = flip_rows(t_c, t, row, end, head, HEADS, 64, 64)
        solved = tl.dot(t_t, grad_v.to(t_c.dtype), input_precision=PRECISION)
        store_rows(grad_r, solved, row, end, head, HEADS, E, 64, COLUMNS, first)
        shrink = tl.exp(sums)[:, None]
        from_o = (grad_c.to(tl.float32) * shrink * scale).to(q_c.dtype)
        q_t = flip_rows(q_c, q, row, end, head, HEADS, D, D_WIDE)
        grad = grad * tl.exp(last) + tl.dot(q_t, from_o, input_precision=PRECISION)
        from_r = (solved * shrink * -step[:, None]).to(k_c.dtype)
        k_t = flip_rows(k_c, k, row, end, head, HEADS, D, D_WIDE)
        grad += tl.dot(k_t, from_r, input_precision=PRECISION)
    if WANTS_INITIAL:
        tl.store(grad_initial + at, grad, mask)


@triton.jit(do_not_specialize=["segments"])
def _rows_backward(
    q, k, v, beta, decay, v_new, states, grad_o, grad_r, grad_states, cu_seqlens,
    grad_q, grad_k, grad_v, grad_g, grad_beta, scale, segments,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_WIDE: tl.constexpr,
    E_WIDE: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of one chunk of one head."""
    head, slot = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row, end, _ = find_chunk(cu_seqlens, slot, segments, SEGMENTS)
    if row >= end:
        return
    q_c = load_rows(q, row, end, head, HEADS, D, 64, D_WIDE)
    k_c = load_rows(k, row, end, head, HEADS, D, 64, D_WIDE)
    o_c = load_rows(grad_o, row, end, head, HEADS, E, 64, E_WIDE)
    n_c = load_rows(v_new, row, end, head, HEADS, E, 64, E_WIDE)
    r_c = load_rows(grad_r, row, end, head, HEADS, E, 64, E_WIDE)
    at, mask = state_at(slot.to(tl.int64), head, 0, D, E, HEADS, D_WIDE, E_WIDE)
    state = tl.load(states + at, mask, other=0.0)
    grad_state = tl.load(grad_states + at, mask, other=0.0)
    step = load_scalars(beta, row, end, head, HEADS, 64)
    sums, last = load_sums(decay, row, end, head, HEADS)
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    shrink = tl.exp(sums)[:, None]
    after = tl.exp(last) * tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))
    # Masked before exp, which would overflow.
    ratio = tl.exp(tl.where(i >= j, sums[:, None] - sums[None, :], -float("inf")))
    scores = tl.dot(o_c, tl.trans(n_c), input_precision=PRECISION) * ratio
    dq = tl.dot(o_c, tl.trans(state), input_precision=PRECISION) * shrink
    dq += tl.dot(scores.to(k_c.dtype), k_c, input_precision=PRECISION)
    dq *= scale
    store_rows(grad_q, dq, row, end, head, HEADS, D, 64, D_WIDE)
    dg = tl.sum(dq * q_c.to(tl.float32), 1)
    system = tl.where(i > j, tl.dot(r_c, tl.trans(n_c), input_precision=PRECISION) * -ratio, 0.0)
    db = tl.dot(system.to(k_c.dtype), k_c, input_precision=PRECISION)
    db -= tl.dot(r_c, tl.trans(state), input_precision=PRECISION) * shrink
    from_k = tl.sum(db * k_c.to(tl.float32), 1)
    dk = db * step[:, None]

    # Row i, column j of the transposed: what key i gave to row j.
    ratio = tl.exp(tl.where(i <= j, sums[None, :] - sums[:, None], -float("inf")))
    scores = tl.dot(n_c, tl.trans(o_c), input_precision=PRECISION) * ratio * scale
    dk += tl.dot(scores.to(q_c.dtype), q_c, input_precision=PRECISION)
    system = tl.dot(n_c, tl.trans(r_c), input_precision=PRECISION) * ratio * -step[None, :]
    system = tl.where(i < j, system, 0.0)
    dk += tl.dot(system.to(k_c.dtype), k_c, input_precision=PRECISION)
    carried = tl.dot(n_c, tl.trans(grad_state), input_precision=PRECISION)
    carried *= tl.exp(last - sums)[:, None]
    dk += carried
    store_rows(grad_k, dk, row, end, head, HEADS, D, 64, D_WIDE)
    after += tl.sum(carried * k_c.to(tl.float32))
    dg += 2 * step * from_k - tl.sum(dk * k_c.to(tl.float32), 1)
    store_scalars(grad_g, tl.cumsum(dg, 0, reverse=True) + after, row, end, head, HEADS, 64)

    r_wide = r_c.to(tl.float32)
    v_c = load_rows(v, row, end, head, HEADS, E, 64, E_WIDE)
    from_v = tl.sum(r_wide * v_c.to(tl.float32), 1)
    store_scalars(grad_beta, from_k + from_v, row, end, head, HEADS, 64)
    store_rows(grad_v, r_wide * step[:, None], row, end, head, HEADS, E, 64, E_WIDE)


def _buffers(q, k, v, g, beta, cu_seqlens, states, has_initial):
    """Gradients, contiguous, of the inputs and the initial states."""
    rows, heads = g.shape
    initial = (cu_seqlens.shape[0] - 1, *states.shape[1:]) if has_initial else (0,)
    return (
        *(x.new_empty(x.shape) for x in (q, k, v, g, beta)),
        v.new_empty(initial, dtype=torch.float32),
    )


@torch.library.custom_op("mol::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    decay: Tensor,
    t: Tensor,
    v_new: Tensor,
    states: Tensor,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    has_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and, if there were any, of the initial states (fp32)."""
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    grad_o = torch.zeros_like(v) if grad_o is None else grad_o.contiguous()
    grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial = grads = _buffers(
        q, k, v, g, beta, cu_seqlens, states, has_initial
    )
    grad_r, grad_states = torch.empty_like(v), torch.empty_like(states)
    sizes, scale = shapes(k, v, cu_seqlens), q.shape[-1] ** -0.5
    segments, heads, slots = cu_seqlens.numel() - 1, q.shape[1], states.shape[0]
    grid, launch = chain_launch(sizes, segments, 2 * sizes["D_WIDE"] + CHUNK, k.element_size())
    _states_backward[grid](
        q, k, beta, t, decay, grad_o,
        grad_initial if grad_final is None else grad_final.contiguous(), cu_seqlens, grad_r,
        grad_states, grad_initial, scale,
        HAS_FINAL=grad_final is not None, WANTS_INITIAL=has_initial, **launch,
    )  # fmt: skip
    _rows_backward[(slots * heads,)](
        q, k, v, beta, decay, v_new, states, grad_o, grad_r, grad_states, cu_seqlens,
        grad_q, grad_k, grad_v, grad_g, grad_beta, scale, segments, num_warps=4, **sizes,
    )  # fmt: skip
    return grads


@delta_rule_backward.register_fake
def _(q, k, v, g, beta, cu_seqlens, decay, t, v_new, states, grad_o, grad_final, has_initial):
    return _buffers(q, k, v, g, beta, cu_seqlens, states, has_initial)
