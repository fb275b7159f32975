"""`MoLForCausalLM`: a language model of this suite as a transformers model.

Shape suffixes: B sequences, T columns (padding included), D width, V vocabulary, L layers.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from mol.export.cache import MoLCache, room_for
from mol.export.configuration_mol import MoLConfig
from mol.export.padding import foreseen, real_columns, turned
from mol.model.transformer import LanguageModel

if "cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    raise ImportError(
        "MoLForCausalLM needs a newer transformers (5.24): pip install -U transformers"
    )

# What the loss takes, and what `generate` hands on beside a model's own arguments.
_OTHERS = {"num_items_in_batch", "ignore_index", "shift_labels", "tokenizer"}


class MoLForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder-only model of any architecture of the suite (`MoLConfig`).

    Padding may stand on either side: with an `attention_mask` each row is computed as if it stood
    alone. Where the mask has a zero, logits and hidden states are those of no token.
    Generation wants padding on the left.
    """

    config_class = MoLConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LanguageModel"]  # decoding steps bypass the hooks that move layers
    _supports_sdpa = True  # what it runs where no kernel of its own does
    _is_stateful = True  # cannot forget tokens, so no assisted generation

    def __init__(self, config: MoLConfig):
        super().__init__(config)
        self.model = LanguageModel(config.architecture())
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """`LanguageModel` has drawn its weights; what comes here are added embedding rows."""
        if isinstance(module, nn.Embedding) and module is not self.model.embedding:
            nn.init.normal_(module.weight, std=self.config.init_std)

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but raises ValueError where weights are missing, superfluous or of
        another shape, in place of drawing the missing ones at random."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[what]:
                names = ", ".join(sorted(map(str, info[what]))[:3])
                raise ValueError(f"{args[0]}: {what.replace('_', ' ')} in the weights: {names}")
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> None:
        """None: logits are a product with the input embeddings, which are stored once."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # it would hold keys and values alone

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache is not False and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = MoLCache()

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def prepare_inputs_for_generation(
        self, input_ids, attention_mask=None, cache=None, is_first_iteration=False, **kwargs
    ):
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError("attention_mask: generation continues the last column, so pad on the "
                             "left and give each row a token")  # fmt: skip
        if cache is not None and not is_first_iteration:
            attention_mask = None  # every generated column is a token
        return super().prepare_inputs_for_generation(
            input_ids,
            attention_mask=attention_mask,
            cache=cache,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: MoLCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """`input_ids` [B, T] int64 and `attention_mask` [B, T] (with a cache [B, columns seen + T])
        to logits [B, T, V], or those of `logits_to_keep`.

        `labels` [B, T] gives the mean cross-entropy of each column's label from the columns before
        it, in nats; -100 is left out, and what only padding stands before. With a `cache` that
        holds tokens the new ones continue it, without gradients. `use_cache` makes a cache; left
        out, the configuration decides where no gradients are recorded. Hidden states: the
        embeddings, each layer's output, and the final norm in place of the last.

        Raises ValueError for what the model cannot do, naming the argument.
        """
        self._check(input_ids, cache, labels, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if cache is None and use_cache:
            cache = MoLCache()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: list[Tensor] | None = [] if output_hidden_states else None
        if cache is not None and cache.columns:
            logits = self._continue(input_ids, attention_mask, cache, states)
            logits = slice_logits_to_keep(logits, logits_to_keep)
        else:
            hidden_BTD = self._read(input_ids, attention_mask, cache, states)
            logits = self.model.logits(slice_logits_to_keep(hidden_BTD, logits_to_keep))
        loss = None
        if labels is not None:
            labels = foreseen(labels, attention_mask)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        hidden_states = None if states is None else tuple(states)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=cache, hidden_states=hidden_states
        )

    def _check(self, input_ids, cache, labels, others: dict) -> None:
        for name in others:
            if name not in _OTHERS and others[name] is not None and others[name] is not False:
                raise ValueError(
                    f"{name}: this model reads token ids, counts positions from the first real "
                    "token and keeps no attention weights, so it cannot take or give them"
                )
        if input_ids is None or input_ids.dim() != 2 or not input_ids.shape[1]:
            raise ValueError("input_ids: give token ids [batch, length], at least one a row")
        if cache is None:
            return
        if not isinstance(cache, MoLCache):
            raise ValueError(f"cache: {type(cache).__name__} cannot hold this model's state; leave "
                             "it out, or pass on the one that a call returned")  # fmt: skip
        if cache.columns and len(input_ids) != cache.n_rows:
            raise ValueError(f"cache: holds {cache.n_rows} rows, input_ids has {len(input_ids)}")
        if cache.columns and labels is not None and torch.is_grad_enabled():
            raise ValueError("labels: no gradients flow into a cache; give the whole text at once")

    def _read(self, ids_BT: Tensor, mask_BT, cache, states: list | None) -> Tensor:
        """Hidden states [B, T, D] of texts from their beginning; fills an empty `cache`."""
        n_rows, length = ids_BT.shape
        self.model.checkpoint_activations = self.gradient_checkpointing and self.training
        column_T = torch.arange(length, device=ids_BT.device)
        extent = real_columns(mask_BT, ids_BT)
        if extent is None:
            held = None if cache is None else self.model.new_cache(n_rows, room_for(length))
            hidden_BTD = self.model(ids_BT, held, states).hidden
            if cache is not None:
                cache.fill(held, length)
            return hidden_BTD
        first_B, length_B = extent
        if cache is None:
            # Padding moves behind the text, where a causal model cannot see it.
            hidden_BTD = self.model(turned(ids_BT, first_B), None, states).hidden
            if states is not None:
                states[:] = [turned(state, -first_B) for state in states]
            return turned(hidden_BTD, -first_B)
        # A state must not take in padding, so rows of one length are read together.
        hidden_BTD, parts, rows = None, [], []
        for own_length in length_B.unique().tolist():
            rows.append((length_B == own_length).nonzero()[:, 0])
            at = rows[-1][:, None], first_B[rows[-1], None] + column_T[:own_length]
            parts.append(self.model.new_cache(len(rows[-1]), room_for(length)))
            own_states: list | None = None if states is None else []
            hidden = self.model(ids_BT[at], parts[-1], own_states).hidden
            if hidden_BTD is None:
                hidden_BTD = hidden.new_zeros(n_rows, length, hidden.shape[-1])
                if states is not None:
                    states += [torch.zeros_like(hidden_BTD) for _ in own_states]
            hidden_BTD[at] = hidden
            for state, own in zip(states or (), own_states or (), strict=True):
                state[at] = own
        cache.join(parts, rows, length - length_B, length)
        return hidden_BTD

    @torch.no_grad()
    def _continue(self, ids_BT: Tensor, mask_BT, cache: MoLCache, states: list | None) -> Tensor:
        """Logits [B, T, V] of new tokens after what `cache` holds."""
        length = ids_BT.shape[1]
        if mask_BT is not None and not mask_BT[:, -length:].all():
            raise ValueError("attention_mask: no padding is possible behind tokens in the cache")
        cache.make_room(self.model, length)
        if cache.pads_B is None and length > 1:
            logits_BTV = self.model.logits(self.model(ids_BT, cache.held, states).hidden)
            cache.columns += length
            return logits_BTV
        steps = []
        for ids_B in ids_BT.unbind(1):
            own: list | None = None if states is None else []
            steps.append((self.model.step(ids_B, cache.held, own), *(own or ())))
            cache.columns += 1
        logits_BTV, *layers = (torch.stack(tensors, 1) for tensors in zip(*steps, strict=True))
        if states is not None:
            states += layers
        return logits_BTV
