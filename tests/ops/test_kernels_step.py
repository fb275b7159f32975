"""A decode step of many sequences by the kernels, as on a GPU, against the modules in fp64."""

import copy

import pytest
import torch
from step_cases import (
    D_MODEL,
    DEVICE,
    ROOM,
    STAGES,
    built,
    compare,
    filled,
    poisoned,
    split,
    tensors,
)

pytest.importorskip("triton")

from mol.model import split_stage
from mol.model.split_stage import SplitStage
from mol.ops import attention, dispatch, glue, grouped
from mol.ops.attention import Rope
from mol.ops.kernels import cache_attention

# Ten products in a row; in 16 bits each result between kernels is rounded. fp32 leaves the
# grouped products to PyTorch.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(cache_attention, "PROGRAMS", 40)


def double(cache):
    """A copy in fp64, which no kernel takes."""
    cache = copy.deepcopy(cache)
    for part in filter(None, vars(cache).values()):
        for name, held in vars(part).items():
            setattr(part, name, held.double() if held.is_floating_point() else held)
    return cache


@torch.no_grad()
def check(config, batch: int, dtype: torch.dtype, positions: list, monkeypatch) -> None:
    """Steps in a row, on caches that are full after the last and NaN where nothing is held."""
    stage = built(SplitStage(config, D_MODEL), dtype)
    plain = copy.deepcopy(stage).double()
    head = stage.routed.attention
    rope = Rope(head.out.shape[-1] // head.n_heads)
    cache = filled(stage.new_cache(batch, ROOM), free=len(positions))
    other, cache = poisoned(cache), double(cache)
    for position in positions:
        x_BD = torch.randn(batch, D_MODEL).to(DEVICE, dtype)
        expected = plain.plain_step(x_BD.double(), rope, position, cache)
        with monkeypatch.context() as patch:
            for module in (split_stage, dispatch, glue, attention, grouped):
                patch.setattr(module, "has_kernels", lambda tensor: True)
            found = stage.plain_step(x_BD, rope, position, other)
        assert found.dtype == dtype
        # x itself would hide errors of the update.
        compare(found.double() - x_BD.double(), expected - x_BD.double(), TOLERANCES[dtype])
        for mine, reference in zip(tensors(other), tensors(cache), strict=True):
            compare(mine, reference, TOLERANCES[dtype])


def on_device(*time: int) -> torch.Tensor:
    return torch.tensor(time, device=DEVICE)


@pytest.mark.parametrize("kind", STAGES)
def test_stages(kind, monkeypatch):
    config, _ = STAGES[kind]
    positions = [ROOM - 3, on_device(ROOM - 2), on_device(5, 0, ROOM - 1)]
    check(config, 3, torch.float32, positions, monkeypatch)


@pytest.mark.parametrize("router", ["bias", "every_block"])
def test_routers_without_a_kernel(router, monkeypatch):
    config = split(router=router, n_shared=2, weights_over="all")
    check(config, 2, torch.float16, [ROOM - 2, on_device(ROOM - 1)], monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["softmax", "deltanet"])
def test_in_low_precision(attention, dtype, monkeypatch):
    """Grouped products included: the blocks of the routed rows differ from step to step."""
    positions = [on_device(time) for time in range(ROOM - 3, ROOM)]
    check(split(attention=attention), 5, dtype, positions, monkeypatch)


@pytest.mark.parametrize("batch", [1, 33])
def test_batches(batch, monkeypatch):
    check(split(), batch, torch.float16, [ROOM - 2, ROOM - 1], monkeypatch)
