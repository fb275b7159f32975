"""Top-k routed FFN experts at full width: the MoE-FFN control of Table 3.

Shapes: n tokens, D width, N experts, k active experts, f inner width, R = n k packed rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mol.model.split_stage import balance_loss
from mol.ops.dispatch import RoutePlan
from mol.ops.grouped import grouped_mm


class Experts(nn.Module):
    """N two-matrix FFNs with tanh-form GELU, of which each token uses those it names."""

    def __init__(self, d: int, n_experts: int, d_ff: int, bias: bool = False):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(n_experts, d, d_ff))
        self.w_out = nn.Parameter(torch.empty(n_experts, d_ff, d))
        self.in_bias = nn.Parameter(torch.empty(n_experts, d_ff)) if bias else None
        self.out_bias = nn.Parameter(torch.empty(n_experts, d)) if bias else None

    def init_weights(self, std: float, residual_std: float) -> None:
        nn.init.normal_(self.w_in, std=std)
        nn.init.normal_(self.w_out, std=residual_std)
        if self.in_bias is not None:
            nn.init.zeros_(self.in_bias)
            nn.init.zeros_(self.out_bias)

    def forward(self, x_nD: Tensor, chosen_nk: Tensor, weights_nk: Tensor) -> Tensor:
        """Weighted sum over each token's experts [n, D]: one sort, two grouped products."""
        plan = RoutePlan.routed(chosen_nk[None], self.w_in.shape[0])
        inner_Rf = grouped_mm(plan.gather(x_nD), self.w_in, plan.offs_E)
        if self.in_bias is not None:
            inner_Rf = inner_Rf + plan.expand(self.in_bias.to(inner_Rf.dtype))
        y_RD = grouped_mm(F.gelu(inner_Rf, approximate="tanh"), self.w_out, plan.offs_E)
        if self.out_bias is not None:
            y_RD = y_RD + plan.expand(self.out_bias.to(y_RD.dtype))
        return plan.combine(y_RD, weights_nk)


class RoutedFFN(nn.Module):
    """FFN experts behind a linear router (one row of D per expert, no bias); the softmax over the
    experts is renormalized over the top k, as in the split stage."""

    def __init__(self, d: int, n_experts: int, top_k: int, d_ff: int, bias: bool = False):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.empty(n_experts, d))
        self.experts = Experts(d, n_experts, d_ff, bias)

    def init_weights(self, std: float, residual_std: float) -> None:
        nn.init.normal_(self.router, std=std)
        self.experts.init_weights(std, residual_std)

    def inactive_parameters(self) -> int:
        """Weights of the experts a token leaves out."""
        n = len(self.router)
        return sum(p.numel() for p in self.experts.parameters()) // n * (n - self.top_k)

    def scores(self, x_nD: Tensor) -> Tensor:
        """Router logits [n, N], in fp32 at least, also inside autocast."""
        wide = torch.promote_types(self.router.dtype, torch.float32)
        with torch.autocast(x_nD.device.type, enabled=False):
            return x_nD.to(wide) @ self.router.T.to(wide)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixture, same shape, and the CV^2 of the experts' mean probabilities."""
        x_nD = x_BTD.reshape(-1, x_BTD.shape[-1])
        probability_nN = self.scores(x_nD).softmax(-1)
        kept_nk, chosen_nk = probability_nN.topk(self.top_k, dim=-1)
        weights_nk = kept_nk / kept_nk.sum(-1, keepdim=True)
        y_nD = self.experts(x_nD, chosen_nk, weights_nk)
        return y_nD.view_as(x_BTD), balance_loss(probability_nN)


def reference_routed(ffn: RoutedFFN, x_nD: Tensor) -> Tensor:
    """The same mixture as a loop over experts, each on every token, unselected ones weighted 0."""
    experts = ffn.experts
    probability_nN = torch.softmax(ffn.scores(x_nD), dim=-1)
    threshold_n1 = probability_nN.sort(dim=-1, descending=True).values[:, ffn.top_k - 1, None]
    kept_nN = probability_nN * (probability_nN >= threshold_n1)
    weights_nN = kept_nN / kept_nN.sum(-1, keepdim=True)
    y_nD = torch.zeros_like(x_nD)
    for i in range(len(experts.w_in)):
        inner_nf = x_nD @ experts.w_in[i]
        if experts.in_bias is not None:
            inner_nf = inner_nf + experts.in_bias[i]
        out_nD = F.gelu(inner_nf, approximate="tanh") @ experts.w_out[i]
        if experts.out_bias is not None:
            out_nD = out_nD + experts.out_bias[i]
        y_nD = y_nD + weights_nN[:, i, None] * out_nD
    return y_nD
