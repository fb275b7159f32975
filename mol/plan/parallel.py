"""`mol plan --parallel N`: memory, traffic and step time of one training run on N GPUs.

Three ways: `ddp` and `fsdp2` as `mol.train.distributed` runs them, `blocks` as Appendix F places
routed blocks (`mol.model.block_parallel`, by all-to-all). Weights, gradients and moments are
counted from the model's own tensors, traffic from what the collectives are given; rows between
placed blocks are those of even routing. Activations are counted on a CPU in fp32, where a layer
keeps more than its kernels keep on a GPU, and halved for bf16. Times follow from the stated speeds.
"""

import argparse
import functools
import json
from typing import NamedTuple

import torch
from torch import nn

from mol.base import UserError
from mol.model.block_parallel import expected_exchange, placement
from mol.model.config import Layer, ModelConfig, SplitLayer
from mol.model.counts import active_parameters
from mol.model.split_stage import SplitStage
from mol.model.transformer import LanguageModel
from mol.ops.attention import Rope
from mol.ops.saved import Saved
from mol.plan.build import find_run
from mol.plan.select import chosen_config
from mol.plan.spec import TrainSpec

FLOAT = 4  # bytes of weights, gradients and moments
WAYS = ("ddp", "fsdp2", "blocks")


class Share(NamedTuple):
    """Bytes of the fullest rank: what it keeps, what it holds for a moment, what it sends."""

    way: str
    weights: int
    gradients: int
    moments: int
    gathered: int  # whole weights and gradients of the layers at work, of FSDP2
    activations: int
    sent: float  # a step, without the few numbers of loss, norm and balance

    @property
    def memory(self) -> int:
        kept = self.weights + self.gradients + self.moments
        return kept + self.gathered + self.activations


@functools.cache
def _meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def sharded(module: nn.Module, ranks: int) -> int:
    """Weights that the first, fullest rank of FSDP2 holds of `module`: a share of each one's rows.
    Other ranks' shares are padded to it where they are sent."""
    return sum(
        -(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) if p.ndim else 1
        for p in module.parameters()
    )


def blocks_held(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Weights on the fullest rank of Appendix F's placement, and those of them that all hold."""
    model = _meta(config)
    routed = fullest = 0
    for stage in (m for m in model.modules() if isinstance(m, SplitStage)):
        block = _numel(stage.routed) // stage.config.n_routed
        routed += _numel(stage.routed)
        fullest += block * placement(stage.config.n_routed, ranks)[0]
    everywhere = _numel(model) - routed
    return everywhere + fullest, everywhere


def share(spec: TrainSpec, way: str, ranks: int, activations: int = 0) -> Share:
    """What one of `ranks` GPUs keeps and sends, with so many bytes of activations.

    Raises UserError for `blocks` without routed blocks, or with fewer of them than ranks.
    """
    config, model = spec.model, _meta(spec.model)
    total, accumulate = _numel(model), spec.optim.accumulate
    others = ranks - 1
    steps = FLOAT * len(list(model.parameters()))  # AdamW counts its steps for each tensor
    gathered = 0
    if way == "ddp":
        held, sent = total, 2 * others * total * FLOAT / ranks
    elif way == "fsdp2":
        held = sharded(model, ranks)
        inside = sum(sharded(layer, ranks) for layer in model.layers)
        # A layer's weights are gathered forward and again backward, embedding and norm once;
        # then every gradient is summed into its shard.
        sent = accumulate * others * FLOAT * (2 * inside + (held - inside) + held)
        largest = max(_numel(layer) for layer in model.layers)
        root = total - sum(_numel(layer) for layer in model.layers)
        # The next layer is gathered while one is at work, whose gradients are whole as well.
        gathered = FLOAT * (3 * largest + 2 * root)
    else:
        held, everywhere = blocks_held(config, ranks)
        stages = [layer for layer in config.layers() if isinstance(layer, SplitLayer)]
        if not stages or min(s.n_routed for s in stages) < ranks:
            raise UserError(f"{spec.condition}: no {ranks} routed blocks in each layer to place")
        sent = 2 * others * everywhere * FLOAT / ranks
        sequences = spec.optim.batch_size / accumulate / ranks
        vector = (2 if spec.precision == "bf16" else FLOAT) * config.d_model
        forwards = 2 if spec.optim.checkpoint_activations else 1
        for stage in stages:
            fullest = placement(stage.n_routed, ranks)[0]
            tokens = sequences * spec.seq_len
            exchange = expected_exchange(stage, ranks, fullest, tokens, sequences)
            once = forwards * exchange.forward(vector) + exchange.backward(vector)
            sent += accumulate * once
    return Share(
        way,
        held * FLOAT,
        held * FLOAT,
        2 * held * FLOAT + steps,
        gathered,
        activations,
        sent,
    )


def activation_bytes(spec: TrainSpec, ranks: int) -> int:
    """Bytes that a rank keeps of one micro-batch for the backward pass: counted for a layer of each
    kind on a CPU, a token; where layers are computed again, one of them and every layer's input."""
    optim = spec.optim
    tokens = -(-optim.batch_size // optim.accumulate // ranks) * spec.seq_len
    layers = spec.model.layers()
    kept = {
        layer: _kept_a_token(spec.model, layer, spec.precision == "bf16") for layer in {*layers}
    }
    if optim.checkpoint_activations:
        a_token = max(kept.values()) + len(layers) * spec.model.d_model * FLOAT
    else:
        a_token = sum(kept[layer] for layer in layers)
    return round(tokens * a_token)


def _kept_a_token(config: ModelConfig, layer: Layer, bf16: bool) -> float:
    one = config.model_copy(
        update={"vocab_size": 1, "n_layers": 1, "layer": layer, "anchor": None, "anchor_at": ()}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LanguageModel(one).layers[0]
    width = layer.d_thin if isinstance(layer, SplitLayer) else config.d_model
    short, long = (
        _kept(module, config.d_model, n, Rope(width // layer.n_heads, config.rope_base))
        for n in (128, 256)
    )
    return (long - short) / 128 / (2 if bf16 else 1)


def _kept(module: nn.Module, width: int, tokens: int, rope: Rope) -> int:
    x_BTD = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    with Saved(module.parameters()) as saved:
        module(x_BTD.requires_grad_(), rope)
    return saved.bytes


def run(args: argparse.Namespace) -> int:
    """Print a row for each way. Raises UserError for figures that cannot be."""
    if not 2 <= args.parallel <= 1024:
        raise UserError(f"--parallel {args.parallel}: must be from 2 to 1,024")
    for name in ("bandwidth", "tflops", "memory"):
        if not 0 < getattr(args, name) < 1e9:
            raise UserError(f"--{name} {getattr(args, name)}: must be above 0 and below 1e9")
    if not args.run:
        raise UserError("--parallel plans one run: add --run NAME, see `mol plan`")
    config = chosen_config(args)
    spec = find_run(args.run, config.scale, config, "train").spec
    rows = list(_rows(spec, args))
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{spec.run_id} on {args.parallel} GPUs, GB of the fullest one")
    names = ("way", "weights", "gradients", "moments", "gathered", "activations", "memory")
    print("".join(f"{name:>12}" for name in (*names, "fits", "sent a step", "step s")))
    for row in rows:
        figures = "".join(f"{row[name] / 1e9:>12.2f}" for name in names[1:])
        step = f"{row['step_s_overlapped']:.2f} to {row['step_s_in_turn']:.2f}"
        fits = "yes" if row["fits"] else "no"
        print(f"{row['way']:>12}{figures}{fits:>12}{row['sent'] / 1e9:>12.2f}  {step}")
    return 0


def _rows(spec: TrainSpec, args: argparse.Namespace):
    ranks, optim = args.parallel, spec.optim
    activations = activation_bytes(spec, ranks)
    # Forward 2, backward 4 operations a weight and token; layers computed again, 2 more.
    operations = 8 if optim.checkpoint_activations else 6
    tokens = optim.batch_size * spec.seq_len
    active = active_parameters(spec.model, "with_delta_extras")
    compute = operations * active * tokens / ranks / (args.tflops * 1e12)
    for way in WAYS:
        try:
            part = share(spec, way, ranks, activations)
        except UserError:
            continue
        traffic = part.sent / (args.bandwidth * 1e9)
        yield part._asdict() | {
            "memory": part.memory,
            "fits": part.memory < args.memory * 1e9,
            "compute_s": compute,
            "traffic_s": traffic,
            "step_s_overlapped": max(compute, traffic),
            "step_s_in_turn": compute + traffic,
        }
