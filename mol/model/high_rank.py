"""The high-rank reference of Table 8: biased experts of rank f, routed by direction.

Shapes: n tokens, D width, N experts, k active experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mol.model.moe_ffn import RoutedFFN


class HighRankMoE(RoutedFFN):
    """Experts D -> f -> D with biases behind a router of anchors: the score of an expert is
    temperature * cos(x, anchor), one learned temperature a layer, and the softmax is renormalized
    over the top k. The shape is that of a public model of the paper's authors, 290,341,892 weights
    at Table 8's size; the start of the temperature is ours, tau = 15 as in Appendix B.
    """

    TAU = 15.0

    def __init__(self, d: int, n_experts: int, top_k: int, rank: int):
        super().__init__(d, n_experts, top_k, rank, bias=True)
        self.temperature = nn.Parameter(torch.empty(()))

    def init_weights(self, std: float, residual_std: float) -> None:
        super().init_weights(std, residual_std)
        nn.init.constant_(self.temperature, self.TAU)

    def scores(self, x_nD: Tensor) -> Tensor:
        wide = torch.promote_types(self.router.dtype, torch.float32)
        with torch.autocast(x_nD.device.type, enabled=False):
            anchors_ND = F.normalize(self.router.to(wide), dim=-1)
            return self.temperature * (F.normalize(x_nD.to(wide), dim=-1) @ anchors_ND.T)
