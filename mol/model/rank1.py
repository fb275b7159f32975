"""Mixture of rank-1 experts: y = sum_i w_i gelu(u_i . x) v_i (Appendices A to D).

Shapes: n tokens, d width, N experts, K active experts, r routing space, E stacked mixtures.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mol.model.config import Rank1FFN


class Rank1Mixture(nn.Module):
    """N pairs u_i, v_i of which each token uses the K nearest in a routing space.

    Score: tau * cos(W_proj x, c_i); with `cosine = mean` the mean of the cosines to an expert's two
    vectors. Weights are the softmax over all N scores, renormalized over the top K, which equals
    the softmax over those K.

    No balance loss: the paper states CV^2 "on per-block routing weights" (2.2) and these mixtures
    route experts of one row each, not blocks. Every other routed model has one.

    `stack` = E holds E independent mixtures in tensors [E, ...], one for each thin block.
    """

    def __init__(self, d: int, config: Rank1FFN, stack: int | None = None):
        super().__init__()
        self.config = config
        lead = () if stack is None else (stack,)
        n, r = config.n_experts, config.routing_dim
        self.u = nn.Parameter(torch.empty(*lead, n, d))
        self.v = nn.Parameter(torch.empty(*lead, n, d))
        self.w_proj = nn.Parameter(torch.empty(*lead, r, d))
        self.routing = nn.Parameter(torch.empty(*lead, n, 2, r))
        self.gate = SEGate(config.top_k, config.se_hidden, stack) if config.se_hidden else None

    def init_weights(self, std: float, residual_std: float) -> None:
        for weight in (self.u, self.w_proj, self.routing):
            nn.init.normal_(weight, std=std)
        nn.init.normal_(self.v, std=residual_std)
        if self.gate is not None:
            self.gate.init_weights(std)

    def inactive_parameters(self) -> int:
        """Weights of the pairs a token leaves out, over the whole stack; it scores all of them."""
        n = self.config.n_experts
        return (self.u.numel() + self.v.numel()) // n * (n - self.config.top_k)

    def cosines(self, x: Tensor) -> Tensor:
        """cos(W_proj x, c_i) as [(E,) n, N], in fp32 at least, also inside autocast: rounding to
        bf16 would decide which experts are the top K."""
        wide = torch.promote_types(self.routing.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            z = F.normalize(x.to(wide) @ self.w_proj.mT.to(wide), dim=-1)
            routing = self.routing.to(wide)
            if self.config.cosine == "first":
                c = F.normalize(routing[..., 0, :], dim=-1)
            else:  # the mean of two cosines is one product with the mean of the unit vectors
                c = F.normalize(routing, dim=-1).mean(-2)
            return z @ c.mT

    def weigh(self, cosines_K: Tensor, activations_K: Tensor) -> Tensor:
        """Weights of the selected experts from their cosines, modulated by the SE gate."""
        weights_K = torch.softmax(self.config.tau * cosines_K, dim=-1)
        return weights_K if self.gate is None else weights_K * self.gate(activations_K)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d], or [E, n, d] when stacked; returns the same shape.

        All N activations come from one dense product and the unselected weights are zero: on
        matrix units this beats a gather of K rows a token unless K is far below N, and its
        gradients need no scatter into the experts.
        """
        shape = x.shape
        x = x if self.u.dim() == 3 else x.reshape(-1, shape[-1])
        cosines_K, chosen_K = self.cosines(x).topk(self.config.top_k, dim=-1)
        inner = x @ self.u.mT
        activations_K = F.gelu(inner.gather(-1, chosen_K), approximate="tanh")
        mixed_K = (self.weigh(cosines_K, activations_K) * activations_K).to(inner.dtype)
        mixed_N = torch.zeros_like(inner).scatter(-1, chosen_K, mixed_K)
        return (mixed_N @ self.v).reshape(shape)


class SEGate(nn.Module):
    """Squeeze-and-excitation over the K selected experts (Appendix C): their activation
    magnitudes, strongest route first, pass K -> hidden -> K with biases, ReLU between and a
    sigmoid after; the result in (0, 1) multiplies the routing weights."""

    def __init__(self, top_k: int, hidden: int, stack: int | None = None):
        super().__init__()
        lead = () if stack is None else (stack,)
        self.w_squeeze = nn.Parameter(torch.empty(*lead, hidden, top_k))
        self.squeeze_bias = nn.Parameter(torch.empty(*lead, 1, hidden))
        self.w_excite = nn.Parameter(torch.empty(*lead, top_k, hidden))
        self.excite_bias = nn.Parameter(torch.empty(*lead, 1, top_k))

    def init_weights(self, std: float) -> None:
        for weight in (self.w_squeeze, self.w_excite):
            nn.init.normal_(weight, std=std)
        for bias in (self.squeeze_bias, self.excite_bias):
            nn.init.zeros_(bias)

    def forward(self, activations_K: Tensor) -> Tensor:
        """activations [(E,) n, K]; returns the gate, same shape."""
        hidden = F.relu(activations_K.abs() @ self.w_squeeze.mT + self.squeeze_bias)
        return torch.sigmoid(hidden @ self.w_excite.mT + self.excite_bias)


def reference_rank1(mixture: Rank1Mixture, x: Tensor) -> Tensor:
    """The same function for x [n, d], one mixture (no stack), written from the equation: a gather
    of the selected pairs for every token. Memory n K d; for tests."""
    config = mixture.config
    z = x @ mixture.w_proj.T
    both = F.cosine_similarity(z[:, None, None], mixture.routing[None], dim=-1)
    cosines = both[..., 0] if config.cosine == "first" else both.mean(-1)
    probability, chosen = torch.softmax(config.tau * cosines, dim=-1).topk(config.top_k, dim=-1)
    weights = probability / probability.sum(-1, keepdim=True)
    u, v = mixture.u[chosen], mixture.v[chosen]
    activations = F.gelu((u * x[:, None]).sum(-1), approximate="tanh")
    if mixture.gate is not None:
        weights = weights * mixture.gate(activations)
    return ((weights * activations)[..., None] * v).sum(1)
