"""The three scales: how a condition of the paper becomes a run that fits the machine."""

import math

from mol.data.config import DataSpec, FileSource, HubSource, PaddedLayout, Source, WheelSource
from mol.model.config import Layer, ModelConfig, Rank1FFN
from mol.plan.experiments import Recipe
from mol.plan.spec import EvalSpec, OptimSpec, ScaleName, TrainSpec

Sources = dict[str, WheelSource | HubSource | FileSource]  # by corpus

# Smoke: widths an eighth of the paper's (a sixteenth at D = 2048), K, N, S and k as printed.
SMOKE_STEPS = 24
SMOKE_TOKENS = 256  # a step; half of it with the GPT-2 vocabulary, whose head dominates
SMOKE_VOCAB = 4096
SMOKE_LR_FACTOR = 10  # narrow models take larger steps; 24 steps at 3e-4 would not leave the start
PROXY_FRACTION = 10  # of the paper's steps on WikiText-103, schedule complete
PROXY_TOKENS = 65_536_000  # of a packed corpus, in one pass: 500 steps of E09, 1,000 of E10
PROXY_CURVE_TOKENS = 131_072  # of a point of the validation curve: short runs have as many points


def default_source(scale: ScaleName) -> Source:
    """Where text comes from when the configuration does not say."""
    return WheelSource() if scale == "smoke" else HubSource()


def smoke_model(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """The same topology at small width: block, expert, head and seed counts are untouched,
    except that rank-1 experts scale with the width, as N and K are ratios to D there."""
    factor = 16 if model.d_model > 1024 else 8
    changes = {
        "vocab_size": vocab_size,
        "d_model": model.d_model // factor,
        "n_layers": min(model.n_layers, 8),
        "layer": _shrink(model.layer, factor),
        "anchor": model.anchor and _shrink(model.anchor, factor),
    }
    return ModelConfig.model_validate(model.model_dump() | changes)


def _shrink(layer: Layer, factor: int) -> dict:
    def narrow(ffn: Rank1FFN) -> dict:
        return ffn.model_dump() | {
            "n_experts": ffn.n_experts // factor,
            "top_k": math.ceil(ffn.top_k / factor),
            "routing_dim": max(4, ffn.routing_dim // factor),
        }

    changes: dict = {}
    for width in ("d_ff", "d_thin", "rank"):
        if getattr(layer, width, None):
            changes[width] = round(getattr(layer, width) / factor)
    if getattr(layer, "rank1", None):
        changes["rank1"] = narrow(layer.rank1)
    if layer.kind == "ct_moe":
        changes["ffn"] = narrow(layer.ffn)
    return layer.model_dump() | changes


def data_spec(recipe: Recipe, scale: ScaleName, sources: Sources) -> DataSpec:
    """The corpus a recipe trains on at a scale."""
    padded = isinstance(recipe.layout, PaddedLayout)
    spec = {
        "corpus": recipe.corpus,
        "source": sources.get(recipe.corpus, default_source(scale)),
        "tokenizer": recipe.tokenizer,
        "vocab_size": recipe.vocab_size,
        "layout": recipe.layout,
    }
    if scale == "smoke":
        spec |= {"max_train_tokens": 200_000, "max_eval_tokens": 20_000}
        if recipe.tokenizer == "bpe":
            spec["vocab_size"] = SMOKE_VOCAB
        if padded:
            spec["layout"] = PaddedLayout(chunk=64, min_chunk=32)
    elif scale == "proxy":
        whole_pass = PROXY_TOKENS + 1  # the last token's target
        tenth = 404_842 * recipe.seq_len // PROXY_FRACTION
        spec["max_train_tokens"] = tenth if padded else whole_pass
    elif not padded:
        spec["max_train_tokens"] = recipe.seq_len * recipe.optim.batch_size * recipe.optim.steps
        spec["max_eval_tokens"] = 10_000_000
    return DataSpec(**spec)


def train_spec(
    slug: str, model: ModelConfig, recipe: Recipe, seed: int, scale: ScaleName, sources: Sources
) -> TrainSpec:
    """One training run of condition `slug` at `scale`."""
    optim, seq_len = recipe.optim, recipe.seq_len
    data = data_spec(recipe, scale, sources)
    if scale == "smoke":
        gpt2 = recipe.tokenizer == "gpt2"
        seq_len = 63 if isinstance(recipe.layout, PaddedLayout) else 64
        model = smoke_model(model, data.vocab_size)
        optim = optim.model_copy(
            update={
                "steps": SMOKE_STEPS,
                "batch_size": SMOKE_TOKENS // (2 if gpt2 else 1) // 64,
                "lr": optim.lr * SMOKE_LR_FACTOR,
                "warmup_steps": 3,
                "accumulate": 1,
                "checkpoint_activations": False,
            }
        )
        share = 2 if gpt2 else 1  # its head makes a scored token dear as well
        evaluation = EvalSpec(every=4, curve_sequences=8 // share, final_sequences=32 // share)
    else:
        if scale == "proxy":
            optim = _shorten(recipe)
        sequences = max(1, PROXY_CURVE_TOKENS // seq_len) if scale == "proxy" else 512
        evaluation = EvalSpec(every=max(1, optim.steps // 100), curve_sequences=sequences)
    return TrainSpec(
        scale=scale,
        condition=slug,
        model=model,
        data=data,
        seq_len=seq_len,
        optim=optim,
        evaluation=evaluation,
        seed=seed,
        precision="fp32" if scale == "smoke" else "bf16",
    )


def _shorten(recipe: Recipe) -> OptimSpec:
    """So many steps that the number of epochs is the paper's: a tenth of them, on a tenth of
    WikiText-103's 404,842 chunks of 255 targets, and one pass over a packed corpus. Warm-up and
    cosine shrink alike."""
    optim = recipe.optim
    steps = optim.steps // PROXY_FRACTION
    if not isinstance(recipe.layout, PaddedLayout):
        steps = max(1, PROXY_TOKENS // (optim.batch_size * recipe.seq_len))
    warmup = optim.warmup_steps * steps // optim.steps
    return optim.model_copy(update={"steps": steps, "warmup_steps": warmup})
