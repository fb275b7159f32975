"""An architecture of this suite as a transformers configuration."""

from typing import Any

import pydantic
from transformers import GenerationConfig, PreTrainedConfig

from mol.base import one_line
from mol.model.config import ModelConfig

# What transformers itself writes into config.json or hands to a configuration.
_LIBRARY_KEYS = {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "output_attentions", "per_layer_config", "quantization_config",
    "tie_last_hidden_states", "torch_dtype",
}  # fmt: skip


class MoLConfig(PreTrainedConfig):
    """Any architecture of the suite: the fields of `mol.model.config.ModelConfig`, which checks
    them, with `layer` and `anchor` as a layer's configuration or its dictionary.

        MoLConfig(vocab_size=32_000, d_model=512, n_layers=8,
                  layer={"kind": "split", "d_thin": 256, "n_heads": 4, "n_blocks": 15,
                         "n_shared": 1, "top_k": 3, "attention": "deltanet", "d_ff": 1024})

    There is no `max_position_embeddings`: positions are rotary and memory is the only bound.
    Raises ValueError for unknown keys and for shapes that do not fit together.
    """

    model_type = "mol"
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int
    d_model: int
    n_layers: int
    layer: Any
    anchor: Any = None
    anchor_at: Any = ()
    norm: str = "rms"
    rope_base: float = 10_000.0
    init_std: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        known = _LIBRARY_KEYS | GenerationConfig().to_dict().keys()
        unknown = sorted(key for key in kwargs.keys() - known if not key.startswith("_"))
        if unknown:
            raise ValueError(f"MoLConfig: unknown key {unknown[0]!r}; its fields are those of "
                             f"ModelConfig: {', '.join(ModelConfig.model_fields)}")  # fmt: skip
        if not self.tie_word_embeddings:
            raise ValueError("MoLConfig: tie_word_embeddings = False; the embeddings are tied")
        plain = self.architecture().model_dump(mode="json")
        for name, value in plain.items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)

    def architecture(self) -> ModelConfig:
        """The checked architecture. Raises ValueError in one line."""
        fields = {name: getattr(self, name) for name in ModelConfig.model_fields}
        try:
            return ModelConfig.model_validate(fields)
        except pydantic.ValidationError as error:
            raise one_line(error, "MoLConfig") from None
