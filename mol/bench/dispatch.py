"""2.3: one softmax split stage, each block on its own tokens only against dense attention that
masks the others; router, gather and scatter included."""

import torch

from mol.bench.common import DTYPES, Outcome, mode_of, out_of_memory_noted, told
from mol.bench.config import DispatchBench, DispatchCase
from mol.bench.paths import dense_restricted
from mol.bench.timing import interleave
from mol.model.config import SplitLayer
from mol.model.split_stage import SplitStage
from mol.ops.attention import Rope
from mol.ops.tracing import compiled


def stage_of(spec: DispatchBench, case: DispatchCase) -> SplitStage:
    """The stage of one case, on the current device, random weights from the global generator."""
    layer = SplitLayer(
        d_thin=spec.d_thin,
        n_heads=spec.n_heads,
        n_blocks=case.n_blocks,
        top_k=case.top_k,
        d_ff=spec.d_ff,
    )
    return SplitStage(layer, spec.d_model)


def run(spec: DispatchBench, device: torch.device, seed: int) -> Outcome:
    """`dispatch_ms` of both paths and `dispatch_speedup`, the ratio of their medians, by case.
    The forward pass is timed, the two paths in turn."""
    metrics, notes = [], []
    mode = mode_of(compiled=spec.compiled, graphed=False)
    rope = Rope(spec.d_thin // spec.n_heads)
    shape = (spec.batch_size, spec.seq_len, spec.d_model)
    for case in spec.cases:
        torch.manual_seed(seed)
        with torch.device(device):
            stage = stage_of(spec, case).to(DTYPES[spec.dtype]).eval()
            x_BTD = torch.randn(shape, dtype=DTYPES[spec.dtype])
        paths = {"dense_restricted": dense_restricted(stage), "sparse": stage.forward}
        if spec.compiled:
            paths = {name: compiled(path) for name, path in paths.items()}
        labels = {"top_k": case.top_k, "n_blocks": case.n_blocks, "mode": mode}
        calls = {
            name: lambda path=path, x_BTD=x_BTD: path(x_BTD, rope) for name, path in paths.items()
        }
        with torch.no_grad(), out_of_memory_noted(notes, f"{case.top_k} of {case.n_blocks}"):
            timings = interleave(calls, spec.warmup, spec.repeats, device)
            for path, timing in timings.items():
                labels_of = labels | {"path": path}
                metrics.append(told(timing.duration("dispatch_ms", "ms", labels_of)))
            dense, sparse = timings["dense_restricted"], timings["sparse"]
            metrics.append(dense.over(sparse, "dispatch_speedup", labels))
    return Outcome(metrics, notes)
