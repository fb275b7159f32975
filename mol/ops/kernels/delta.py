"""The gated delta rule over packed segments in three kernels, in chunks of C = 64 rows.

With q and k of unit length, g the log decay and G its sum since the chunk began, a chunk that
starts from the state S (d x e) computes

    A  = tril(diag(beta) K K^T * exp(G_i - G_j), -1),     T = (I + A)^-1
    W  = T diag(beta exp(G)) K,     U = T diag(beta) V
    V' = U - W S
    O  = d^-0.5 (diag(exp(G)) Q S + tril(Q K^T * exp(G_i - G_j)) V')
    S <- exp(G_C) S + K^T diag(exp(G_C - G)) V'

`solve` finds T, W and U of all chunks at once, `_states` carries S through each segment and
replaces U by V', `outputs` makes O of all chunks at once. Writing S to memory (as many bytes as
v) and leaving O to a kernel of its own keeps the chain over a segment's chunks at two products a
chunk, so one long segment among many delays little; it is also what the backward pass needs.

A row and head moves, in units of one vector of 64 values: 4 in `solve` (k, v; w, u), 5 in
`_states` (w, u, k; v', S) and 5 in `outputs` (q, k, v', S; o). Without gradients `outputs` norms
and gates o as well and reads the gate: one more, where a kernel of its own moves three.

A segment's chunks take the slots from start // 64 + segment on. The next segment starts at or
beyond the slot after its last, so N // 64 + S slots hold any lengths, no table is built, and the
host reads nothing; programs of the slots between exit at once.

Shape suffixes: N packed rows, S segments, H heads, d key width, e value width, M chunk slots,
C rows of a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mol.ops.kernels.delta_backward import delta_rule_backward
from mol.ops.kernels.delta_outputs import outputs
from mol.ops.kernels.delta_solve import (
    CHUNK,
    chain_launch,
    flip_rows,
    load_rows,
    load_sums,
    shapes,
    solve,
    state_at,
    store_rows,
)
from mol.ops.kernels.operator import operator
from mol.ops.kernels.shares import row_strided


@triton.jit
def _states(
    k, w, u, decay, cu_seqlens, initial, states, final,
    HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, HAS_INITIAL: tl.constexpr,
    WANTS_FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of one segment's and head's state through its chunks; U becomes V' in place."""
    first = tl.program_id(0) % tl.cdiv(E, COLUMNS) * COLUMNS
    head = tl.program_id(0) // tl.cdiv(E, COLUMNS) % HEADS
    segment = tl.program_id(0) // (tl.cdiv(E, COLUMNS) * HEADS)
    start = tl.load(cu_seqlens + segment).to(tl.int64)
    end = tl.load(cu_seqlens + segment + 1).to(tl.int64)
    slot = start // 64 + segment
    at, mask = state_at(segment.to(tl.int64), head, first, D, E, HEADS, D_WIDE, COLUMNS)
    if HAS_INITIAL:
        state = tl.load(initial + at, mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([D_WIDE, COLUMNS], tl.float32)
    for chunk in tl.range(0, tl.cdiv(end - start, 64), num_stages=STAGES):
        row = start + chunk * 64
        chunk_at, _ = state_at(slot + chunk, head, first, D, E, HEADS, D_WIDE, COLUMNS)
        narrow = state.to(states.dtype.element_ty)
        tl.store(states + chunk_at, narrow, mask)
        w_c = load_rows(w, row, end, head, HEADS, D, 64, D_WIDE)
        k_c = load_rows(k, row, end, head, HEADS, D, 64, D_WIDE)
        u_c = load_rows(u, row, end, head, HEADS, E, 64, COLUMNS, first)
        sums, last = load_sums(decay, row, end, head, HEADS)
        new = u_c.to(tl.float32) - tl.dot(w_c, narrow, input_precision=PRECISION)
        store_rows(u, new, row, end, head, HEADS, E, 64, COLUMNS, first)
        grown = (new * tl.exp(last - sums)[:, None]).to(k_c.dtype)
        k_t = flip_rows(k_c, k, row, end, head, HEADS, D, D_WIDE)
        state = state * tl.exp(last) + tl.dot(k_t, grown, input_precision=PRECISION)
    if WANTS_FINAL:
        tl.store(final + at, state, mask)


def _buffers(
    q: Tensor, v: Tensor, cu_seqlens: Tensor, final_state: bool, train: bool
) -> tuple[Tensor, ...]:
    (rows, heads, width), value_width = q.shape, v.shape[-1]
    segments = cu_seqlens.shape[0] - 1
    state = heads, width, value_width
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        v.new_empty((segments, *state) if final_state else (0,), dtype=torch.float32),
        v.new_empty(rows, heads, dtype=torch.float32),
        v.new_empty((rows, heads, CHUNK) if train else (0,)),
        torch.empty_like(v, memory_format=torch.contiguous_format),
        v.new_empty(rows // CHUNK + segments, *state),
    )


@operator("mol::delta_rule")
def delta_rule_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial: Tensor | None,
    final_state: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the last states, and what the backward pass reads: G, T, V' and the states before
    each chunk. Not asked for, the last states and T are empty tensors."""
    return _launch((q, k, v, g, beta), cu_seqlens, initial, final_state, train)


def _launch(
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    initial: Tensor | None,
    final_state: bool,
    train: bool,
    gate_NM: Tensor | None = None,
    norm_Ee: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """What `delta_rule_op` returns; with a gate, o normed and gated."""
    q, k, v, g, beta = (x.contiguous() for x in inputs)
    o, final, decay, t, v_new, states = _buffers(q, v, cu_seqlens, final_state, train)
    w = torch.empty_like(k)
    segments, heads, slots = cu_seqlens.numel() - 1, q.shape[1], states.shape[0]
    sizes = shapes(k, v, cu_seqlens)
    # A tile of T is two instructions of the tensor cores wide and one high, so two warps share it;
    # rows of more than 128 bytes need the registers of more.
    row_bytes = max(sizes["D_WIDE"], sizes["E_WIDE"]) * k.element_size()
    warps = 2 if row_bytes <= 128 else 4 if row_bytes <= 256 else 8
    solve[(slots * heads,)](
        k, v, g, beta, cu_seqlens, decay, t, w, v_new, segments,
        KEEP_T=train, num_warps=warps, **sizes,
    )  # fmt: skip
    grid, launch = chain_launch(sizes, segments, 2 * sizes["D_WIDE"], k.element_size())
    _states[grid](
        k, w, v_new, decay, cu_seqlens,
        final if initial is None else initial.float().contiguous(), states, final,
        HAS_INITIAL=initial is not None, WANTS_FINAL=final_state, **launch,
    )  # fmt: skip
    gated = gate_NM is not None
    gate, norm = (row_strided(gate_NM), norm_Ee.contiguous()) if gated else (o, o)
    # With 128 registers four programs fit a multiprocessor; the gate would take a few more.
    outputs[(slots * heads,)](
        q, k, v_new, decay, states, cu_seqlens, o, gate, norm, q.shape[-1] ** -0.5, eps, segments,
        segments // norm.shape[0] if gated else 1,
        GATED=gated, GATE_STRIDE=gate.stride(0), num_warps=4,
        maxnreg=128 if row_bytes <= 128 else None, **sizes,
    )  # fmt: skip
    return o, final, decay, t, v_new, states


@delta_rule_op.register_fake
def _(q, k, v, g, beta, cu_seqlens, initial, final_state, train):
    return _buffers(q, v, cu_seqlens, final_state, train)


def _keep(ctx, inputs, output):
    *saved, initial, _, _ = inputs
    ctx.save_for_backward(*saved, *output[2:])
    ctx.initial_dtype = None if initial is None else initial.dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_o, grad_final, *_):
    *grads, grad_initial = delta_rule_backward(
        *ctx.saved_tensors, grad_o, grad_final, ctx.initial_dtype is not None
    )
    grad_initial = None if ctx.initial_dtype is None else grad_initial.to(ctx.initial_dtype)
    return *grads, None, grad_initial, None, None


delta_rule_op.register_autograd(_differentiate, setup_context=_keep)


def delta_rule(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHe: Tensor,
    g_NH: Tensor,
    beta_NH: Tensor,
    cu_seqlens: Tensor,
    state_SHde: Tensor | None = None,
    final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [N, H, e] in v's dtype and, if asked, the last state of each segment in fp32.

    As `mol.ops.gated_delta.gated_delta_rule` with q and k already of unit length and of v's dtype
    (bf16, fp16 or fp32); d and e up to 128. `cu_seqlens` int32 [S + 1]; segments may be empty, and
    rows past the last are neither read nor written.
    """
    inputs = q_NHd, k_NHd, v_NHe, g_NH, beta_NH
    train = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*inputs, state_SHde)
    )
    o, final, *_ = delta_rule_op(*inputs, cu_seqlens, state_SHde, final_state, train)
    return o, final if final_state else None


def gated_delta_rule(
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    state_SHde: Tensor | None,
    final_state: bool,
    gate_NM: Tensor,
    norm_Ee: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm of `delta_rule`'s outputs over the head, times `norm` of the segment's block, times
    SiLU(gate): [N, H e] in v's dtype, and the last states if asked. No gradients.

    `inputs` are q, k, v, g, beta. Segments are numbered block * (S / E) + sequence. `gate_NM` may
    be a view with rows apart.
    """
    operands = inputs, cu_seqlens, state_SHde, final_state, False, gate_NM, norm_Ee, eps
    o, final, *_ = _launch(*operands)
    return o.flatten(1), final if final_state else None
