"""Table 12 and Appendix H: milliseconds to decode a token, with a cache and without."""

import itertools

import torch

from mol.bench.common import Outcome, out_of_memory_noted, random_ids, random_model
from mol.bench.config import DecodeBench
from mol.bench.timing import interleave, measure
from mol.model.attention import KVCache
from mol.model.delta import DeltaCache
from mol.model.split_stage import StageCache
from mol.model.transformer import Cache, LanguageModel


def filled_cache(model: LanguageModel, batch: int, context: int, room: int) -> Cache:
    """A cache as after `context` tokens, with space for `room` more.

    Its content is random: time depends on how much is held, not on the values. Each routed
    softmax block holds an even share of the tokens, context * k / E.
    """
    cache = model.new_cache(batch, context + room)
    for layer, held in zip(model.config.layers(), cache.layers, strict=True):
        if isinstance(held, StageCache):
            routed = (
                context if layer.coverage == "full" else context * layer.top_k // layer.n_routed
            )
            _fill(held.routed, routed)
            if held.shared is not None:
                _fill(held.shared, context)
        else:
            _fill(held, context)
    cache.position = context
    return cache


def _fill(held: KVCache | DeltaCache, tokens: int) -> None:
    if isinstance(held, DeltaCache):
        held.tail_SJC.normal_()
        held.state_SHdd.normal_()
    else:
        held.keys_SHLd[:, :, :tokens].normal_()
        held.values_SHLd[:, :, :tokens].normal_()
        held.used_S.fill_(tokens)


def run(spec: DecodeBench, device: torch.device, seed: int) -> Outcome:
    """`decode_ms` by model, context and cache; a call decodes one token of each sequence.

    With a cache the context grows by one a call, as in generation, and tokens are random, so
    that routed blocks change from call to call. Without one (at the shortest context only) a
    call runs the whole context and takes the last position's logits; the two are timed in turn.
    """
    metrics, notes = [], []
    calls = spec.warmup + spec.repeats
    for name, config in spec.models.items():
        model = random_model(config, device, spec.dtype, seed)
        ids_CB = random_ids(config.vocab_size, (calls, spec.batch_size), device, seed)
        for context in spec.contexts:
            labels = {"model": name, "context": context, "batch": spec.batch_size, "cache": True}
            with torch.no_grad(), out_of_memory_noted(notes, f"{name}, context {context}"):
                cache = filled_cache(model, spec.batch_size, context, room=calls)
                tokens = itertools.cycle(ids_CB)

                def cached(model=model, tokens=tokens, cache=cache):
                    return model.step(next(tokens), cache)

                if context > min(spec.contexts):
                    timing = measure(cached, spec.warmup, spec.repeats, device)
                    metrics.append(timing.duration("decode_ms", "ms/token", labels))
                    continue
                ids_BT = random_ids(config.vocab_size, (spec.batch_size, context), device, seed)

                def whole(model=model, ids_BT=ids_BT):
                    return model.logits(model(ids_BT).hidden[:, -1])

                both = {True: cached, False: whole}
                for has_cache, timing in interleave(
                    both, spec.warmup, spec.repeats, device
                ).items():
                    metrics.append(
                        timing.duration("decode_ms", "ms/token", labels | {"cache": has_cache})
                    )
    return Outcome(metrics, notes)
