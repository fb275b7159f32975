"""Losses of five small models that a change must not move: `python tests/train/golden.py` writes
them anew for this torch and this kind of processor, after a change that is meant to.

One thread, fp32. Inputs are arithmetic, so that they depend on no library; weights are drawn by
torch's generator from a seed.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from mol.model.config import CTMoELayer, DenseLayer, ModelConfig, Rank1FFN, SplitLayer
from mol.model.transformer import LanguageModel
from mol.plan.spec import OptimSpec
from mol.train.step import TrainStep

FILE = Path(__file__).with_name("golden_losses.json")
STEPS, VOCABULARY, LENGTH = 6, 257, 24
THIN = {"d_thin": 32, "n_heads": 2, "d_ff": 48}
LAYERS = {
    "dense softmax": DenseLayer(n_heads=4, d_ff=96),
    "dense DeltaNet": DenseLayer(n_heads=4, d_ff=96, attention="deltanet"),
    "K=5 top-3": SplitLayer(**THIN, n_blocks=5, top_k=3, coverage="full"),
    "DeltaNet 1+2of5": SplitLayer(**THIN, n_blocks=5, n_shared=1, top_k=2, attention="deltanet"),
    "rank-1 mixture": CTMoELayer(n_heads=4, ffn=Rank1FFN(n_experts=64, top_k=6, routing_dim=8)),
}


def key() -> str:
    """What the last bit depends on: torch, and the instructions for which its kernels, and its
    linear algebra library by the processor's maker, are chosen."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    makers = [line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {makers[0] if makers else 'unknown'}"


@contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def losses(name: str) -> list[float]:
    """Training loss of each step."""
    with one_thread():
        torch.manual_seed(11)
        config = ModelConfig(vocab_size=VOCABULARY, d_model=64, n_layers=2, layer=LAYERS[name])
        optim = OptimSpec(steps=STEPS, batch_size=4, lr=1e-3, warmup_steps=0)
        step = TrainStep(LanguageModel(config), optim, LENGTH, torch.device("cpu"), bf16=False)
        place = torch.arange(4 * (LENGTH + 1)).view(4, -1)
        ids = (place**2 // 7 + 3 * place) % VOCABULARY
        real = torch.ones(4, LENGTH, dtype=torch.bool)
        found = []
        for _ in range(STEPS):
            step([(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), real)], optim.lr)
            found.append(step.figures()[0])
    return found


def kept() -> dict[str, dict[str, list[float]]]:
    """Key -> model -> losses; a float's JSON form is exact."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


if __name__ == "__main__":
    everything = kept() | {key(): {name: losses(name) for name in LAYERS}}
    FILE.write_text(json.dumps(everything, indent=1) + "\n")
    sys.stdout.write(f"{FILE.name}: {key()}\n")
