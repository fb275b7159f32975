"""2.3: softmax split stages, each block on its own tokens only against dense attention that masks
the others; router, gather and scatter included."""

from collections.abc import Callable

import torch
from torch import Tensor

from mol.bench.common import (
    DTYPES,
    Outcome,
    mode_of,
    out_of_memory_noted,
    random_ids,
    random_model,
    told,
)
from mol.bench.config import DispatchBench, DispatchCase
from mol.bench.timing import interleave
from mol.model.config import ModelConfig, SplitLayer
from mol.model.paths import dense_restricted, stages_by
from mol.model.split_stage import SplitStage
from mol.ops.attention import Rope
from mol.ops.graph import Captured
from mol.ops.tracing import compiled


def layer_of(spec: DispatchBench, case: DispatchCase) -> SplitLayer:
    return SplitLayer(
        d_thin=spec.d_thin,
        n_heads=spec.n_heads,
        n_blocks=case.n_blocks,
        top_k=case.top_k,
        d_ff=spec.d_ff,
    )


def run(spec: DispatchBench, device: torch.device, seed: int) -> Outcome:
    """`dispatch_ms` of both paths and `dispatch_speedup`, the ratio of their medians, by case.
    The forward pass is timed, the two paths in turn; on a CPU nothing is captured."""
    metrics, notes = [], []
    graphed = spec.run_as == "graph" and device.type == "cuda"
    mode = mode_of(compiled=spec.run_as == "compiled", graphed=graphed)
    for case in spec.cases:
        labels = {"top_k": case.top_k, "n_blocks": case.n_blocks, "mode": mode}
        if spec.n_layers:
            labels |= {"layers": spec.n_layers}
        with torch.no_grad(), out_of_memory_noted(notes, f"{case.top_k} of {case.n_blocks}"):
            paths, given = (_model if spec.n_layers else _stage)(spec, case, device, seed)
            traced = _to_compile(spec.run_as, graphed)
            paths |= {name: compiled(paths[name]) for name in traced}
            if graphed:
                paths = {name: Captured(path, given) for name, path in paths.items()}
            calls = {name: lambda f=path, x=given: f(x) for name, path in paths.items()}
            timings = interleave(calls, spec.warmup, spec.repeats, device)
            for path, timing in timings.items():
                ran = mode_of(compiled=path in traced, graphed=graphed)
                labels_of = labels | {"path": path, "mode": ran}
                metrics.append(told(timing.duration("dispatch_ms", "ms", labels_of)))
            dense, sparse = timings["dense_restricted"], timings["sparse"]
            metrics.append(told(dense.over(sparse, "dispatch_speedup", labels)))
    return Outcome(metrics, notes)


def _to_compile(run_as: str, graphed: bool) -> tuple[str, ...]:
    """The sparse path consists of the project's kernels, and as a graph needs no compiler."""
    if run_as == "compiled":
        return ("dense_restricted", "sparse")
    return ("dense_restricted",) if graphed else ()


def _stage(
    spec: DispatchBench, case: DispatchCase, device: torch.device, seed: int
) -> tuple[dict[str, Callable], Tensor]:
    """One stage by both paths, and its input."""
    torch.manual_seed(seed)
    rope = Rope(spec.d_thin // spec.n_heads)
    with torch.device(device):
        stage = SplitStage(layer_of(spec, case), spec.d_model).to(DTYPES[spec.dtype]).eval()
        shape = (spec.batch_size, spec.seq_len, spec.d_model)
        x_BTD = torch.randn(shape, dtype=DTYPES[spec.dtype])
    restricted = dense_restricted(stage)
    paths = {"dense_restricted": lambda x: restricted(x, rope), "sparse": lambda x: stage(x, rope)}
    return paths, x_BTD


def _model(
    spec: DispatchBench, case: DispatchCase, device: torch.device, seed: int
) -> tuple[dict[str, Callable], Tensor]:
    """A whole model by both paths, and its tokens; all logits are computed."""
    config = ModelConfig(
        vocab_size=spec.vocab_size,
        d_model=spec.d_model,
        n_layers=spec.n_layers,
        layer=layer_of(spec, case),
    )
    model = random_model(config, device, spec.dtype, seed)

    def sparse(ids_BT: Tensor) -> Tensor:
        return model.logits(model(ids_BT).hidden)

    def restricted(ids_BT: Tensor) -> Tensor:
        with stages_by(model, dense_restricted):
            return sparse(ids_BT)

    shape = (spec.batch_size, spec.seq_len)
    return {"dense_restricted": restricted, "sparse": sparse}, random_ids(
        spec.vocab_size, shape, device, seed
    )
