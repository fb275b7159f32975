"""The decoder-only language model around every kind of layer the paper trains (4.2).

Shapes: B batch, T tokens, D = d_model, V vocabulary, k routed blocks a token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mol.model import fast_step
from mol.model.attention import SoftmaxAttention
from mol.model.config import Layer, ModelConfig
from mol.model.delta import GatedDeltaNet
from mol.model.high_rank import HighRankMoE
from mol.model.moe_ffn import RoutedFFN
from mol.model.rank1 import Rank1Mixture
from mol.model.split_stage import SplitStage
from mol.ops.attention import Rope
from mol.ops.glue import EPS, add_layer_norm


class ModelOutput(NamedTuple):
    """`hidden` [B, T, D] after the final norm, inside autocast in its precision; `balance` the CV^2
    loss averaged over the routed layers (0-dim), 0 without one, and of split stages without
    gradients; `routes` the chosen blocks [B, T, k] of each split layer with a linear router,
    numbered among the routed blocks, first layer first."""

    hidden: Tensor
    balance: Tensor
    routes: list[Tensor]


class Cache:
    """Decoding state: one cache a layer and the number of tokens seen.

    `position` is an int, or an int64 tensor on the model's device: [1] for steps that a CUDA graph
    replays, or [B] where sequences are of unlike length. The host then does not know it, and
    whoever steps keeps within `max_len`.
    """

    def __init__(self, layers: list, batch: int, max_len: int):
        self.layers = layers
        self.batch = batch
        self.max_len = max_len
        self.position: int | Tensor = 0

    def branch(self, parent_B: Tensor) -> "Cache":
        """A cache of its own whose sequence i holds what sequence `parent_B[i]` (int64) of this one
        holds: several continuations of one prompt, which is then computed once."""
        layers = [layer.branch(parent_B, self.batch) for layer in self.layers]
        copy = Cache(layers, len(parent_B), self.max_len)
        copy.position = self.position if isinstance(self.position, int) else self.position.clone()
        return copy


def make_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm with a weight, or LayerNorm with weight and bias."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.d_model, eps=EPS)


def add_norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, norm: nn.Module, multiplied: bool = True
) -> tuple[Tensor, Tensor]:
    """(x' = x + branch + bias, norm(x')), see `mol.ops.glue.add_layer_norm`."""
    shift = getattr(norm, "bias", None)  # RMSNorm has none
    return add_layer_norm(x, branch, bias, norm.weight, shift, multiplied)


class DenseFFN(nn.Module):
    """Two matrices, tanh-form GELU between, no bias: 2 D f weights."""

    def __init__(self, d: int, d_ff: int):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(d, d_ff))
        self.w_out = nn.Parameter(torch.empty(d_ff, d))

    def init_weights(self, std: float, residual_std: float) -> None:
        nn.init.normal_(self.w_in, std=std)
        nn.init.normal_(self.w_out, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.w_in, approximate="tanh") @ self.w_out

    def inactive_parameters(self) -> int:
        return 0


def _has_router(layer: Layer) -> bool:
    if layer.kind == "split":
        return layer.chooses
    return layer.kind in ("moe_ffn", "high_rank_moe")


def make_ffn(d: int, layer: Layer) -> nn.Module:
    """The feed-forward half of a full-width layer."""
    if layer.kind == "dense":
        return DenseFFN(d, layer.d_ff)
    if layer.kind == "ct_moe":
        return Rank1Mixture(d, layer.ffn)
    if layer.kind == "moe_ffn":
        return RoutedFFN(d, layer.n_experts, layer.top_k, layer.d_ff)
    return HighRankMoE(d, layer.n_experts, layer.top_k, layer.rank)


class FullWidthLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)), at width D."""

    def __init__(self, config: ModelConfig, layer: Layer):
        super().__init__()
        delta = layer.kind == "dense" and layer.attention == "deltanet"
        attention = GatedDeltaNet if delta else SoftmaxAttention
        self.attention_norm = make_norm(config)
        self.attention = attention(config.d_model, layer.n_heads)
        self.ffn_norm = make_norm(config)
        self.ffn = make_ffn(config.d_model, layer)

    def init_weights(self, std: float, residual_std: float) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for half in (self.attention, self.ffn):
            half.init_weights(std, residual_std)

    def inactive_parameters(self) -> int:
        """Weights that a token leaves out."""
        return self.ffn.inactive_parameters()

    def _ffn(
        self, x: Tensor, attended: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Routers read the norm in fp32.
        multiplied = isinstance(self.ffn, DenseFFN)
        x, normed = add_norm(x, attended, bias, self.ffn_norm, multiplied)
        y, balance = self.ffn(normed), None
        if isinstance(self.ffn, RoutedFFN):
            y, balance = y
        return x, y, balance

    def forward(
        self,
        x_BTD: Tensor,
        rope: Rope,
        cache=None,
        start: int = 0,
        branch_BTD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(x, branch [B, T, D], CV^2 of routed FFN experts). The layer's input is x + branch, if
        there is one, and so is its output: the next norm adds them as it reads them."""
        x_BTD, normed_BTD = add_norm(x_BTD, branch_BTD, None, self.attention_norm)
        attended_BTD = self.attention.unbiased(normed_BTD, rope, cache, start)
        return self._ffn(x_BTD, attended_BTD, self.attention.bias)

    def new_cache(self, batch: int, max_len: int):
        return self.attention.new_cache(batch, max_len)

    def step(self, x_BD: Tensor, rope: Rope, position: int | Tensor, cache) -> Tensor:
        if self.steps_in_kernels(x_BD):
            return fast_step.dense_step(self, x_BD, rope, position, cache)
        return self.plain_step(x_BD, rope, position, cache)

    def steps_in_kernels(self, x_BD: Tensor) -> bool:
        """Whether a step on `x_BD` is a chain of the project's kernels, which need no compiler."""
        return isinstance(self.ffn, DenseFFN) and fast_step.takes_layer(self, x_BD)

    def plain_step(self, x_BD: Tensor, rope: Rope, position: int | Tensor, cache) -> Tensor:
        """`step` as the layer's modules compute it: the fused step's reference."""
        normed_BD = add_norm(x_BD, None, None, self.attention_norm)[1]
        attended_BD = self.attention.step(normed_BD, rope, position, cache)
        x_BD, branch_BD, _ = self._ffn(x_BD, attended_BD, None)
        return x_BD + branch_BD


class LanguageModel(nn.Module):
    """Tied embedding, pre-norm layers, one final norm.

    Weights are N(0, init_std), residual output projections N(0, init_std / sqrt(2 L)), from the
    global generator; on the meta device nothing is drawn. `checkpoint_activations = True`
    recomputes each layer in the backward pass.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        device = torch.get_default_device()
        with torch.device("meta"):  # so that every weight is drawn once, below
            table = torch.empty(config.vocab_size, config.d_model)
            self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
            self.layers = nn.ModuleList(
                SplitStage(layer, config.d_model)
                if layer.kind == "split"
                else FullWidthLayer(config, layer)
                for layer in config.layers()
            )
            self.norm = make_norm(config)
        self._n_routed = sum(_has_router(layer) for layer in config.layers())
        # Not modules: the tables are shared by all layers whose heads have one width.
        shared: dict[int, Rope] = {}
        self._ropes = [
            shared.setdefault(head, Rope(head, config.rope_base))
            for head in (self._head_width(layer) for layer in config.layers())
        ]
        if device.type != "meta":
            self._materialize(device)
            self.init_weights()

    def _head_width(self, layer: Layer) -> int:
        width = layer.d_thin if layer.kind == "split" else self.config.d_model
        return width // layer.n_heads

    def _materialize(self, device: torch.device) -> None:
        """Real memory for meta weights. `Module.to_empty` would import the symbolic-shape tools
        (0.4 s of every start) to work out strides."""
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                real = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                module.register_parameter(name, nn.Parameter(real))

    def init_weights(self) -> None:
        """Draw all weights anew from the global generator."""
        std = self.config.init_std
        residual_std = std / (2 * self.config.n_layers) ** 0.5
        nn.init.normal_(self.embedding.weight, std=std)
        for layer in self.layers:
            layer.init_weights(std, residual_std)
        self.norm.reset_parameters()

    def forward(
        self, ids_BT: Tensor, cache: Cache | None = None, states: list[Tensor] | None = None
    ) -> ModelOutput:
        """Token ids [B, T] (int64) to hidden states; fills an empty `cache`, or continues one that
        holds tokens. A list given as `states` receives each layer's input and what the final norm
        returns. Raises ValueError when the cache is too small, or when its position is a
        tensor, which only `step` takes."""
        start = 0 if cache is None else cache.position
        if not isinstance(start, int):
            raise ValueError("forward needs a cache whose position is an int; use step")
        if cache is not None and start + ids_BT.shape[1] > cache.max_len:
            raise ValueError(
                f"{ids_BT.shape[1]} tokens do not fit: the cache holds {start} of {cache.max_len}; "
                "create it with a larger max_len"
            )
        x_BTD, branch_BTD = self.embedding(ids_BT), None
        balances, routes = [], []
        recompute = self.checkpoint_activations and cache is None and torch.is_grad_enabled()
        held = cache.layers if cache is not None else [None] * len(self.layers)
        for layer, rope, layer_cache in zip(self.layers, self._ropes, held, strict=True):
            full = isinstance(layer, FullWidthLayer)
            if branch_BTD is not None and (states is not None or not full):
                x_BTD, branch_BTD = x_BTD + branch_BTD, None
            if states is not None:
                states.append(x_BTD)
            inputs = x_BTD, rope, layer_cache, start
            if full:
                inputs += (branch_BTD,)
            if recompute:
                output = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                output = layer(*inputs)
            if full:
                x_BTD, branch_BTD, balance = output
            else:
                x_BTD, balance, route_BTk = output
                if route_BTk is not None:
                    routes.append(route_BTk)
            if balance is not None:
                balances.append(balance)
        if cache is not None:
            cache.position += ids_BT.shape[1]
        balance = sum(balances, x_BTD.new_zeros(())) / max(1, self._n_routed)
        hidden_BTD = add_norm(x_BTD, branch_BTD, None, self.norm)[1]
        if states is not None:
            states.append(hidden_BTD)
        return ModelOutput(hidden_BTD, balance, routes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Product with the tied embedding, [..., D] to [..., V]."""
        weight = self.embedding.weight
        if hidden.dim() == 2 and fast_step.takes_head(self.norm, hidden, weight):
            return fast_step.head_step(None, hidden, weight)
        return F.linear(hidden, weight)

    def new_cache(self, batch: int, max_len: int) -> Cache:
        """Room for `max_len` tokens of each of `batch` sequences."""
        layers = [layer.new_cache(batch, max_len) for layer in self.layers]
        return Cache(layers, batch, max_len)

    @torch.no_grad()
    def step(self, ids_B: Tensor, cache: Cache, states: list[Tensor] | None = None) -> Tensor:
        """Feed one token of each sequence and return the next one's logits [B, V]; `states` as in
        `forward`, without the time.
        Raises ValueError when the cache is full, if its position is known on the host."""
        if isinstance(cache.position, int) and cache.position >= cache.max_len:
            raise ValueError(
                f"the cache holds {cache.max_len} tokens; create it with a larger max_len"
            )
        x_BD = self.embedding(ids_B)
        for layer, rope, held in zip(self.layers, self._ropes, cache.layers, strict=True):
            if states is not None:
                states.append(x_BD)
            x_BD = layer.step(x_BD, rope, cache.position, held)
        cache.position += 1
        if states is None and fast_step.takes_head(self.norm, x_BD, self.embedding.weight):
            return fast_step.head_step(self.norm, x_BD, self.embedding.weight)
        hidden_BD = self.norm(x_BD)
        if states is not None:
            states.append(hidden_BD)
        return self.logits(hidden_BD)
