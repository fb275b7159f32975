"""Small models of the plan's architectures, and the finished runs that hold them."""

import json
from datetime import UTC, datetime

import torch

from mol.cli import main
from mol.model.config import ModelConfig
from mol.model.transformer import LanguageModel
from mol.plan.build import plan
from mol.plan.select import run_folder
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec
from mol.store.record import Metric, Protocol, Record, save_record
from mol.train.checkpoint import save_weights
from mol.train.environment import hardware, provenance
from mol.train.run import data_hashes

VOCAB = 300


def family(model: ModelConfig) -> str:
    """What tells architectures apart, sizes aside."""
    layer = model.layer
    parts = [layer.kind, model.norm]
    if layer.kind == "split":
        parts += ["all" if layer.top_k == layer.n_routed else "top", layer.coverage, layer.router]
        parts += ["shared"] * (layer.n_shared > 0) + ["rank1"] * (layer.rank1 is not None)
    ffn = getattr(layer, "ffn", None) or getattr(layer, "rank1", None)
    parts += ["gate"] * bool(ffn and ffn.se_hidden)
    parts += [getattr(layer, "attention", "softmax"), *(["anchor"] if model.anchor else [])]
    return "-".join(parts)


def families() -> dict[str, ModelConfig]:
    """The first smoke model of each family of the plan, with a small vocabulary, two layers
    (four where anchors stand among them) and at most 256 rank-1 experts."""
    found: dict[str, ModelConfig] = {}
    for run in plan("smoke"):
        if run.spec.kind == "train":
            found.setdefault(family(run.spec.model), run.spec.model)
    return {name: _smaller(model) for name, model in found.items()}


def _smaller(model: ModelConfig) -> ModelConfig:
    changed = model.model_dump() | {"vocab_size": VOCAB, "n_layers": 4 if model.anchor else 2}
    if model.anchor:
        changed["anchor_at"] = (0, 3)
    for layer in filter(None, (changed["layer"], changed["anchor"])):
        mixture = layer.get("ffn") or layer.get("rank1")
        if mixture:  # thousands of experts of one row take their time
            mixture["n_experts"] = min(mixture["n_experts"], 256)
            mixture["top_k"] = min(mixture["top_k"], 16)
    return ModelConfig.model_validate(changed)


FAMILIES = families()


def drawn(model: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model with weights large enough that its predictions differ from token to token."""
    torch.manual_seed(seed)
    made = LanguageModel(model).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return made


def finished_run(folder, data, meta, model: ModelConfig, condition: str):
    """What training leaves of `model`, at its drawn weights."""
    spec = TrainSpec(
        scale="smoke",
        condition=condition,
        model=model,
        data=data,
        seq_len=32,
        optim=OptimSpec(steps=2, batch_size=2, lr=1e-3, warmup_steps=1),
        evaluation=EvalSpec(every=1, curve_sequences=1),
        seed=1,
    )
    run = run_folder(folder, spec)
    pins = {"run_id": spec.run_id, "tokenizer_sha256": meta.tokenizer_sha256}
    config = json.dumps(model.model_dump(mode="json"))
    save_weights(run, drawn(model), pins | {"config": config})
    protocol = Protocol(
        tokenizer=f"bpe:{meta.tokenizer_sha256[:12]}", pad="none", layout="stream",
        context=32, stride=32, split="test",
    )  # fmt: skip
    now = datetime.now(UTC)
    save_record(
        run,
        Record(
            run_id=spec.run_id,
            spec=spec,
            status="complete",
            started=now,
            finished=now,
            wall_s=1.5,
            hardware=hardware("cpu"),
            provenance=provenance("train", data_hashes(meta)),
            metrics=(
                Metric(
                    name="ppl", value=41.25, unit="ppl/token", n=64, stderr=0.5, protocol=protocol
                ),
                Metric(name="params_total", value=1000, unit="count", labels={"rule": "total"}),
            ),  # fmt: skip
            notes=("text: made up",),
        ),
    )
    return run


def export(results, *arguments) -> int:
    """The exit code of `mol export` with these arguments."""
    return main(["export", *map(str, arguments), "--results", str(results.folder)])
