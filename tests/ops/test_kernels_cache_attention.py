"""One row against each segment's cache, by kernels and by PyTorch."""

import pytest
import torch
from torch import Tensor

from mol.ops.attention import step_in_cache_reference

triton = pytest.importorskip("triton")

from mol.ops.kernels import cache_attention  # noqa: E402 (needs Triton)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # bf16: the result's own rounding


def compare(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCES[found.dtype], f"relative error {error:.2e}"


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads, width", [(3, 20), (1, 64)])
def test_a_row_against_its_segment(heads, width, dtype, nan_memory, monkeypatch):
    """Segments of unlike length, among them an empty and an almost full one; the rows beyond
    what a segment holds are NaN and must not be looked at."""
    monkeypatch.setattr(cache_attention, "PROGRAMS", 40)  # four parts, or eight
    q, k, v = draw(3, 3, heads, width, dtype=dtype)
    used_S = torch.tensor([0, 9, 133, 4, 149], device=DEVICE)
    segment_N = torch.tensor([4, 0, 2], device=DEVICE)
    keys, values = draw(2, 5, heads, 150, width, dtype=dtype)
    held = torch.arange(150, device=DEVICE) < used_S[:, None]
    plain = [t.double().masked_fill(~held[:, None, :, None], 0) for t in (keys, values)]
    for t in (keys, values):
        t.masked_fill_(~held[:, None, :, None], torch.nan)
    counts = used_S.clone()
    expected = step_in_cache_reference(
        q.double(), k.double(), v.double(), *plain, segment_N, counts, 150
    )
    found = cache_attention.step_in_cache(q, k, v, keys, values, segment_N, used_S)
    compare(found, expected)
    assert torch.equal(used_S, counts)
    held = torch.arange(150, device=DEVICE) < used_S[:, None]
    for mine, reference in zip((keys, values), plain, strict=True):
        assert torch.equal(mine.double().masked_fill(~held[:, None, :, None], 0), reference)
