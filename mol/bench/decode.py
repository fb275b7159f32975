"""Table 12 and Appendix H: milliseconds to decode a token, with a cache and without."""

from collections.abc import Callable

import torch
from torch import Tensor

from mol.bench.common import (
    Outcome,
    layers_compiled,
    mode_of,
    out_of_memory_noted,
    random_ids,
    random_model,
    told,
)
from mol.bench.config import DecodeBench
from mol.bench.timing import interleave
from mol.model.attention import KVCache
from mol.model.config import ModelConfig
from mol.model.delta import DeltaCache
from mol.model.split_stage import StageCache
from mol.model.transformer import Cache, FullWidthLayer, LanguageModel
from mol.ops.graph import Captured

# A call without a cache runs the whole context again, seconds beyond this.
UNCACHED_UP_TO = 8_192


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
    that routed blocks change from call to call. Without one (at the shortest context only, and up
    to `UNCACHED_UP_TO` tokens) a call runs the whole context and takes the last position's logits;
    the two are timed in turn.
    On a GPU both are captured as CUDA graphs, and what is not a chain of the project's kernels is
    compiled before; a call copies the ids and replays.
    """
    metrics, notes = [], []
    for name, config in spec.models.items():
        found = _one_model(spec, name, config, device, seed)
        metrics += found.metrics
        notes += found.notes
    if device.type == "cuda":
        notes.append(
            "each timed call copies the ids and replays one graph of the whole step; the position "
            "and the cache advance on the device"
        )
    return Outcome(metrics, notes)


def graphed_step(model: LanguageModel, cache: Cache, ids_B: Tensor) -> Captured:
    """`model.step` on `cache` as a CUDA graph of the ids; warming up feeds `Captured.WARMUP`
    tokens, for which the cache needs room."""
    cache.position = torch.tensor([cache.position], device=ids_B.device)
    return Captured(lambda ids_B: model.step(ids_B, cache), ids_B)


def _one_model(
    spec: DecodeBench, name: str, config: ModelConfig, device: torch.device, seed: int
) -> Outcome:
    """In a function of its own, so that two models are never in memory at once."""
    metrics, notes = [], []
    calls = spec.warmup + spec.repeats
    model = random_model(config, device, spec.dtype, seed)
    ids_CB = random_ids(config.vocab_size, (calls, spec.batch_size), device, seed)
    for context in spec.contexts:
        labels = {"model": name, "context": context, "batch": spec.batch_size}
        what = f"{name}, context {context}"
        on_gpu = device.type == "cuda"
        with torch.no_grad(), out_of_memory_noted(notes, what):
            x_BD = model.embedding(ids_CB[0])
            traced = {
                True: on_gpu and not model.layers[0].steps_in_kernels(x_BD),
                False: on_gpu and isinstance(model.layers[0], FullWidthLayer),
            }
            with layers_compiled(model, device, step=traced[True]):
                uncached_too = context == min(spec.contexts) and context <= UNCACHED_UP_TO
                ways = _ways(model, ids_CB, context, uncached_too, seed)
                timings = interleave(ways, spec.warmup, spec.repeats, device)
            for has_cache, timing in timings.items():
                mode = mode_of(compiled=traced[has_cache], graphed=on_gpu)
                labels |= {"cache": has_cache, "mode": mode}
                metrics.append(told(timing.duration("decode_ms", "ms/token", labels)))
    return Outcome(metrics, notes)


def _ways(
    model: LanguageModel, ids_CB: Tensor, context: int, uncached_too: bool, seed: int
) -> dict[bool, Callable]:
    """The calls to time, by whether they use a cache; each decodes the next row of `ids_CB`."""
    calls, batch = ids_CB.shape
    device, tokens = ids_CB.device, iter(ids_CB)
    on_gpu = device.type == "cuda"
    cache = filled_cache(model, batch, context, room=calls + on_gpu * Captured.WARMUP)
    step = graphed_step(model, cache, ids_CB[0]) if on_gpu else lambda ids: model.step(ids, cache)
    ways: dict[bool, Callable] = {True: lambda: step(next(tokens))}
    if uncached_too:
        ids_BT = random_ids(model.config.vocab_size, (batch, context), device, seed)

        def whole(ids_BT: Tensor) -> Tensor:
            return model.logits(model(ids_BT).hidden[:, -1])

        run_whole = Captured(whole, ids_BT) if on_gpu else whole
        ways[False] = lambda: run_whole(ids_BT)
    return ways
