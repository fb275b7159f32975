"""Table 10: one full-width block, softmax attention against Gated DeltaNet, forward + backward."""

import torch

from mol.bench.common import (
    DTYPES,
    Outcome,
    attention_backend,
    mode_of,
    out_of_memory_noted,
    random_model,
    told,
)
from mol.bench.config import AttentionBench
from mol.bench.timing import interleave
from mol.model.config import DenseLayer, ModelConfig
from mol.ops.attention import Rope

ATTENTION = ("softmax", "deltanet")


def run(spec: AttentionBench, device: torch.device, seed: int) -> Outcome:
    """`attention_ms` by attention and length; the two blocks in turn.

    A block is norm, attention, norm and FFN with both residuals; gradients flow to its weights
    and its input. The paper does not say whether its block holds an FFN, nor its batch.
    """
    metrics, notes = [], []
    blocks = {}
    for attention in ATTENTION:
        layer = DenseLayer(attention=attention, n_heads=spec.n_heads, d_ff=spec.d_ff)
        config = ModelConfig(vocab_size=1, d_model=spec.d_model, n_layers=1, layer=layer)
        blocks[attention] = random_model(config, device, spec.dtype, seed).layers[0].train()
    rope = Rope(spec.d_model // spec.n_heads)
    for length in spec.lengths:
        shape = (spec.batch_size, length, spec.d_model)
        with out_of_memory_noted(notes, f"{spec.batch_size} x {length} tokens"):
            x_BTD = torch.randn(shape, device=device, dtype=DTYPES[spec.dtype], requires_grad=True)
            grad_BTD = torch.randn_like(x_BTD)

            def both_ways(block, x_BTD=x_BTD, grad_BTD=grad_BTD):
                block(x_BTD, rope)[0].backward(grad_BTD)
                block.zero_grad()
                x_BTD.grad = None

            calls = {a: lambda block=block, f=both_ways: f(block) for a, block in blocks.items()}
            timings = interleave(calls, spec.warmup, spec.repeats, device)
            for attention, timing in timings.items():
                eager = mode_of(compiled=False, graphed=False)
                labels = {"attention": attention, "length": length, "mode": eager}
                metrics.append(told(timing.duration("attention_ms", "ms", labels)))
    if device.type == "cuda":
        head = spec.d_model // spec.n_heads
        chosen = (
            f"{n}: {attention_backend(spec.n_heads, head, n, device, spec.dtype)}"
            for n in spec.lengths
        )
        notes.append(f"torch's choice for causal attention, forward, {', '.join(chosen)}")
    return Outcome(metrics, notes)
