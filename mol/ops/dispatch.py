"""Route plan: which rows go to which block, in which order, and back (2.3).

Pairs (token, slot) are sorted by (block, sequence); the sort is stable, so a block's rows of one
sequence stay in time order. One block's rows of one sequence form a segment. Everything stays on
the device: no size is read on the host.

Shape suffixes: B sequences, T positions, k slots a token, E blocks, N = B T k packed rows,
D width, M any width, P pairs in their own order, C runs of tokens; segments are numbered
block * B + sequence.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mol.ops.tracing import has_kernels

TABLES = (
    "order_N", "inverse_N", "block_N", "within_N", "time_N", "segment_N", "offs_E", "cu_seqlens"
)  # fmt: skip


@dataclass(frozen=True)
class RoutePlan:
    """Packed order of the (token, slot) pairs of one stage and its inverse.

    Each token must name a block at most once, so no segment is longer than `length`.
    """

    n_blocks: int
    batch: int
    length: int  # T, the bound on a segment
    slots: int  # k
    equal: bool  # every block has all the tokens, so all segments are `length` long
    order_N: Tensor  # packed row -> pair (token * k + slot)
    inverse_N: Tensor  # pair -> packed row
    block_N: Tensor
    within_N: Tensor  # position in the segment
    time_N: Tensor  # position in the sequence
    segment_N: Tensor
    offs_E: Tensor  # int32, last row + 1 of each block
    cu_seqlens: Tensor  # int32 [E * B + 1]

    @classmethod
    def routed(cls, idx_BTk: Tensor, n_blocks: int, counts_EC: Tensor | None = None) -> "RoutePlan":
        """Plan for the blocks `idx_BTk` (distinct along k, each below `n_blocks`); `counts_EC`, if
        at hand, are those of `mol.ops.kernels.route` and save a launch."""
        batch, length, slots = idx_BTk.shape
        device = idx_BTk.device
        if has_kernels(idx_BTk):
            from mol.ops.kernels.plan import plan

            tables = plan(idx_BTk.reshape(-1, slots), batch, length, n_blocks, counts_EC)
            sizes = dict(n_blocks=n_blocks, batch=batch, length=length, slots=slots, equal=False)
            return cls(**sizes, **dict(zip(TABLES, tables, strict=True)))
        sequence_B = torch.arange(batch, device=device)
        segment_P = (idx_BTk * batch + sequence_B[:, None, None]).reshape(-1)
        time_P = torch.arange(segment_P.numel(), device=device) // slots % length
        return cls.of_pairs(segment_P, time_P, n_blocks, batch, length, slots)

    @classmethod
    def of_pairs(
        cls,
        segment_P: Tensor,
        time_P: Tensor,
        n_blocks: int,
        batch: int,
        length: int,
        slots: int = 1,
    ) -> "RoutePlan":
        """Plan for the pairs (token, slot) of these segments and positions; those of one segment
        must come in order."""
        segment_N, order_N = torch.sort(segment_P, stable=True)
        edges = torch.arange(n_blocks * batch + 1, device=order_N.device)
        cu_seqlens = torch.searchsorted(segment_N, edges)
        row_N = torch.arange(order_N.numel(), device=order_N.device)
        return cls(
            n_blocks=n_blocks,
            batch=batch,
            length=length,
            slots=slots,
            equal=False,
            order_N=order_N,
            inverse_N=torch.empty_like(order_N).index_copy_(0, order_N, row_N),
            block_N=segment_N // batch,
            within_N=row_N - cu_seqlens[segment_N],
            time_N=time_P[order_N],
            segment_N=segment_N,
            offs_E=cu_seqlens[batch::batch].to(torch.int32),
            cu_seqlens=cu_seqlens.to(torch.int32),
        )

    @classmethod
    def full(cls, n_blocks: int, batch: int, length: int, device: torch.device) -> "RoutePlan":
        """Plan in which every block sees every token: k = E and slot = block."""
        return _full(n_blocks, batch, length, torch.device(device))

    def gather(self, x_TD: Tensor) -> Tensor:
        """Rows of the B T tokens in packed order, [N, D]; a token appears k times."""
        if self.n_blocks == 1 and self.equal:
            return x_TD
        # The kernel walks over tokens, so it wants a plan of all of them.
        if has_kernels(x_TD) and self.order_N.numel() == x_TD.shape[0] * self.slots:
            from mol.ops.kernels.combine import gather

            return gather(x_TD, self.inverse_N, self.slots)
        return _Gather.apply(x_TD, self.order_N, self.inverse_N, self.slots)

    def combine(self, y_ND: Tensor, weights_Tk: Tensor | None = None) -> Tensor:
        """Sum over each token's k rows, weighted if weights are given, [B T, D].

        A permutation and a sum of k terms in a fixed order: deterministic, no atomics.
        """
        if self.n_blocks == 1 and self.equal:
            return y_ND if weights_Tk is None else y_ND * weights_Tk.to(y_ND.dtype)
        if has_kernels(y_ND):
            return self._fused(y_ND, weights_Tk, None, None, 1.0, 1.0)
        y_TkD = _Permute.apply(y_ND, self.inverse_N, self.order_N)
        y_TkD = y_TkD.view(-1, self.slots, y_ND.shape[-1])
        if weights_Tk is not None:
            # Not an einsum: batched matrix-vector products are 2 to 4 times slower on a CPU.
            y_TkD = y_TkD * weights_Tk.to(y_ND.dtype)[..., None]
        return y_TkD.sum(1)

    def compose(
        self,
        base_TD: Tensor,
        shared_TD: Tensor | None,
        y_ND: Tensor,
        weights_Tk: Tensor | None,
        shared_scale: float,
        scale: float,
    ) -> Tensor:
        """base + shared_scale shared + scale combine(y, weights), [B T, D], in one pass on CUDA."""
        if has_kernels(y_ND):
            return self._fused(y_ND, weights_Tk, base_TD, shared_TD, shared_scale, scale)
        return added(base_TD, shared_TD, self.combine(y_ND, weights_Tk), shared_scale, scale)

    def _fused(self, y_ND: Tensor, *operands: Tensor | float | None) -> Tensor:
        from mol.ops.kernels.combine import combine

        return combine(y_ND, self.inverse_N, *operands, self.slots)

    def expand(self, weight_EM: Tensor) -> Tensor:
        """Each row's own block's row of `weight_EM`: [N, M], or [1, M] for one block."""
        if self.n_blocks == 1:
            return weight_EM
        return _Expand.apply(weight_EM, self.block_N)


def added(
    base: Tensor, shared: Tensor | None, routed: Tensor, shared_scale: float, scale: float
) -> Tensor:
    """base + scale routed + shared_scale shared, which may be absent."""
    total = torch.add(base, routed, alpha=scale)
    return total if shared is None else torch.add(total, shared, alpha=shared_scale)


@functools.lru_cache(maxsize=8)
def _full(n_blocks: int, batch: int, length: int, device: torch.device) -> RoutePlan:
    """Kept, as every layer of a model asks for the same one: 8 small kernels each time."""
    tokens = batch * length
    with torch.inference_mode(False):  # gradients may need these tables later
        row_N = torch.arange(n_blocks * tokens, device=device)
        within_N = row_N % length
        return RoutePlan(
            n_blocks=n_blocks,
            batch=batch,
            length=length,
            slots=n_blocks,
            equal=True,
            order_N=row_N.view(tokens, n_blocks).t().reshape(-1),
            inverse_N=row_N.view(n_blocks, tokens).t().reshape(-1),
            block_N=row_N // tokens,
            within_N=within_N,
            time_N=within_N,
            segment_N=row_N // length,
            offs_E=torch.arange(1, n_blocks + 1, device=device, dtype=torch.int32) * tokens,
            cu_seqlens=torch.arange(n_blocks * batch + 1, device=device, dtype=torch.int32)
            * length,
        )


def forget_plans() -> None:
    """Drop the kept plans. A CUDA graph reads its tables wherever they lay when it was recorded, so
    they have to be made while it is, and for it alone."""
    _full.cache_clear()


def segment_sum(x_NM: Tensor, block_N: Tensor, n_blocks: int) -> Tensor:
    """Sum of the rows of each block, [E, M], as a product with the one-hot rows: no atomics."""
    blocks_E = torch.arange(n_blocks, device=x_NM.device)
    return (blocks_E[:, None] == block_N).to(x_NM.dtype) @ x_NM


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, order_N, inverse_N, slots):
        ctx.save_for_backward(inverse_N)
        ctx.slots = slots
        return x_TD[order_N // slots]

    @staticmethod
    def backward(ctx, grad_ND):
        (inverse_N,) = ctx.saved_tensors
        grad_TkD = grad_ND[inverse_N].view(-1, ctx.slots, grad_ND.shape[-1])
        return grad_TkD.sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, index_N, inverse_N):
        ctx.save_for_backward(inverse_N)
        return x_ND[index_N]

    @staticmethod
    def backward(ctx, grad_ND):
        (inverse_N,) = ctx.saved_tensors
        return grad_ND[inverse_N], None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_EM, block_N):
        ctx.save_for_backward(block_N)
        ctx.n_blocks = weight_EM.shape[0]
        return weight_EM[block_N]

    @staticmethod
    def backward(ctx, grad_NM):
        (block_N,) = ctx.saved_tensors
        return segment_sum(grad_NM, block_N, ctx.n_blocks), None


def reference_rows(idx_BTk: Tensor, n_blocks: int) -> list[list[tuple[int, int]]]:
    """Plain loops: for each segment (block * B + sequence) its (time, slot) pairs in order."""
    batch, length, slots = idx_BTk.shape
    chosen = idx_BTk.tolist()
    return [
        [
            (t, slot)
            for t in range(length)
            for slot in range(slots)
            if chosen[sequence][t][slot] == block
        ]
        for block in range(n_blocks)
        for sequence in range(batch)
    ]
