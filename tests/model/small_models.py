"""One small model of every kind of layer the paper trains."""

from mol.model.config import ModelConfig

_RANK1 = {"n_experts": 12, "top_k": 3, "routing_dim": 6}
_SPLIT = {"kind": "split", "d_thin": 8, "n_heads": 2, "n_blocks": 5}
_HYBRID = _SPLIT | {"n_shared": 1, "top_k": 2, "d_ff": 12}
_UNIFORM = _SPLIT | {"top_k": 5, "coverage": "full", "router": "none"}
_CT_MOE = {"kind": "ct_moe", "n_heads": 4, "ffn": _RANK1}


def _model(layer: dict, **changes) -> ModelConfig:
    return ModelConfig(**{"vocab_size": 50, "d_model": 16, "n_layers": 3, "layer": layer} | changes)


SMALL = {
    "dense": _model({"kind": "dense", "n_heads": 2, "d_ff": 20}),
    "dense_deltanet": _model({"kind": "dense", "attention": "deltanet", "n_heads": 2, "d_ff": 20}),
    "ct_moe": _model(_CT_MOE),
    "ct_moe_se": _model(_CT_MOE | {"ffn": _RANK1 | {"se_hidden": 4}}),
    "moe_ffn": _model({"kind": "moe_ffn", "n_heads": 2, "n_experts": 5, "top_k": 3, "d_ff": 8}),
    "high_rank": _model(
        {"kind": "high_rank_moe", "n_heads": 2, "n_experts": 6, "top_k": 2, "rank": 8},
        norm="layer",
    ),
    "top3": _model(_SPLIT | {"top_k": 3, "coverage": "full", "d_ff": 12}),
    "all_active": _model(_UNIFORM | {"d_ff": 12}),
    "sparse": _model(_SPLIT | {"top_k": 3, "d_ff": 12}),
    "softmax_1p2of5": _model(_HYBRID),
    "deltanet_1p2of5": _model(_HYBRID | {"attention": "deltanet"}),
    "one_deltanet_block": _model(
        _SPLIT
        | {"n_blocks": 1, "top_k": 1, "coverage": "full", "router": "none", "d_ff": 12}
        | {"attention": "deltanet"}
    ),
    "rank1_mid": _model(_UNIFORM | {"rank1": _RANK1}, anchor=_CT_MOE, anchor_at=(0, 2)),
}
