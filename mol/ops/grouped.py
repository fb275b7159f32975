"""Grouped product: each block's rows times that block's matrix.

Shape suffixes: N packed rows, E blocks, K and M the widths.

Measured on one CPU thread (E = 14, N = 768, fp32, widths 32 to 256, forward and backward):
`F.grouped_mm` took 0.57 to 0.87 of the time of a loop over split rows, so it is the fast path
there too, wherever strides are multiples of 16 bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mol.ops.dispatch import RoutePlan
from mol.ops.tracing import has_kernels, untraced

native_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
# Tracing knows the product in bf16 alone, although CPUs run it in fp32 too.
_untraced = untraced(native_mm)


def as_operand(x: Tensor, weight: Tensor) -> Tensor:
    """x in the precision in which it is multiplied by `weight`: autocast's inside it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x.to(weight.dtype)


def grouped_mm(
    x_NK: Tensor,
    w_EKM: Tensor,
    offs_E: Tensor,
    equal: bool = False,
    gelu: bool = False,
    add_NM: Tensor | None = None,
) -> Tensor:
    """x of each group times the group's matrix, then GELU (its tanh form) or + add, [N, M].

    `offs_E` (int32) holds the last row + 1 of each group; `equal` says that all groups have N / E
    rows. Inside autocast both operands take its dtype (the native product is not on its list).
    """
    assert not (gelu and add_NM is not None)
    x_NK = as_operand(x_NK, w_EKM)
    w_EKM = w_EKM.to(x_NK.dtype)
    if _fuses(x_NK, w_EKM, equal):
        from mol.ops.kernels.grouped_gemm import grouped_gemm

        return grouped_gemm(x_NK, w_EKM, offs_E, None, 1, gelu, add_NM)
    if _trains(x_NK, w_EKM):
        from mol.ops.grouped_train import trained_mm

        y_NM = trained_mm(x_NK, w_EKM, offs_E, equal, add_NM)
        return F.gelu(y_NM, approximate="tanh") if gelu else y_NM
    if add_NM is not None and has_kernels(x_NK) and (equal or w_EKM.shape[0] == 1):
        return _sum(add_NM, x_NK, w_EKM)
    y_NM = _product(x_NK, w_EKM, offs_E, equal)
    if gelu:
        return F.gelu(y_NM, approximate="tanh")
    return y_NM if add_NM is None else add_NM + y_NM


def gathered_mm(x_XK: Tensor, w_EKM: Tensor, plan: RoutePlan) -> Tensor:
    """`grouped_mm` of the tokens' rows in packed order, [N, M]; on CUDA without gradients the
    rows are gathered as they are multiplied, and blocks that see all tokens share one copy."""
    operand_XK = as_operand(x_XK, w_EKM)
    if _trains(operand_XK, w_EKM) and not (plan.equal and plan.n_blocks == 1):
        from mol.ops.grouped_train import trained_gathered_mm

        return trained_gathered_mm(operand_XK, w_EKM.to(operand_XK.dtype), plan)
    if plan.equal and plan.n_blocks > 1 and has_kernels(operand_XK):
        shared_EXK = operand_XK.expand(plan.n_blocks, *operand_XK.shape)
        return torch.bmm(shared_EXK, w_EKM.to(operand_XK.dtype)).flatten(0, 1)
    if _fuses(operand_XK, w_EKM, plan.equal):
        from mol.ops.kernels.grouped_gemm import grouped_gemm

        w_EKM = w_EKM.to(operand_XK.dtype)
        rows = plan.offs_E, plan.order_N, plan.slots
        return grouped_gemm(operand_XK, w_EKM, *rows, False, None)
    return grouped_mm(plan.gather(operand_XK), w_EKM, plan.offs_E, plan.equal)


def ffn_sum(
    h_Nd: Tensor, in_EdF: Tensor, out_EFd: Tensor, add_Nd: Tensor, plan: RoutePlan
) -> Tensor:
    """add + the feed-forward network of each row's block, GELU(h W_in) W_out."""
    offs_E, equal = plan.offs_E, plan.equal
    operand_Nd = as_operand(h_Nd, in_EdF)
    if _trains(operand_Nd, in_EdF):
        from mol.ops.grouped_train import trained_ffn

        operands = (t.to(operand_Nd.dtype) for t in (in_EdF, out_EFd, add_Nd))
        return trained_ffn(operand_Nd, *operands, offs_E, equal)
    inner_NF = grouped_mm(h_Nd, in_EdF, offs_E, equal, gelu=True)
    return grouped_mm(inner_NF, out_EFd, offs_E, equal, add_NM=add_Nd)


def _trains(x: Tensor, w_EKM: Tensor) -> bool:
    """Whether the product, with gradients, is one of `mol.ops.grouped_train`."""
    aligned = w_EKM.shape[1] % 8 == w_EKM.shape[2] % 8 == 0
    return aligned and has_kernels(x) and x.dtype == torch.bfloat16 and torch.is_grad_enabled()


def _fuses(x: Tensor, w_EKM: Tensor, equal: bool) -> bool:
    """Whether the project's own product computes it; single matrices and equal groups have others
    that suit them."""
    several = w_EKM.shape[0] > 1 and not equal
    return several and x.element_size() == 2 and has_kernels(x) and not torch.is_grad_enabled()


def _sum(add_NM: Tensor, x_NK: Tensor, w_EKM: Tensor) -> Tensor:
    """add + the product of equal groups; PyTorch multiplies onto a copy of `add`, which moves a
    third less than a sum of its own."""
    n_groups = w_EKM.shape[0]
    if n_groups == 1:
        return torch.addmm(add_NM, x_NK, w_EKM[0])
    groups = [t.reshape(n_groups, -1, t.shape[-1]) for t in (add_NM, x_NK)]
    return torch.baddbmm(*groups, w_EKM).flatten(0, 1)


def _product(x_NK: Tensor, w_EKM: Tensor, offs_E: Tensor, equal: bool) -> Tensor:
    kind = x_NK.device.type
    n_groups, width_in, width_out = w_EKM.shape
    if n_groups == 1:
        return x_NK @ w_EKM[0]
    if equal:
        return torch.bmm(x_NK.view(n_groups, -1, width_in), w_EKM).view(-1, width_out)
    cuda = kind == "cuda"
    if x_NK.dtype not in ((torch.bfloat16,) if cuda else (torch.bfloat16, torch.float32)):
        return grouped_mm_reference(x_NK, w_EKM, offs_E)
    multiple = 16 // x_NK.element_size()
    pad_in, pad_out = -width_in % multiple, -width_out % multiple
    if not (pad_in or pad_out):
        native = native_mm if x_NK.dtype == torch.bfloat16 else _untraced
        return native(x_NK.contiguous(), w_EKM.contiguous(), offs=offs_E)
    if not cuda:
        return grouped_mm_reference(x_NK, w_EKM, offs_E)
    # Zero columns cost a copy; the loop would cost a host sync and E small products.
    y_NM = native_mm(F.pad(x_NK, (0, pad_in)), F.pad(w_EKM, (0, pad_out, 0, pad_in)), offs=offs_E)
    return y_NM[:, :width_out]


@untraced
def grouped_mm_reference(x_NK: Tensor, w_EKM: Tensor, offs_E: Tensor) -> Tensor:
    """A loop over groups; reads the offsets on the host."""
    ends = offs_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    products = [x @ w for x, w in zip(x_NK.split(sizes), w_EKM.unbind(0), strict=True)]
    return torch.cat(products)
