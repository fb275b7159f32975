"""Sums over parts against PyTorch's in fp64."""

import pytest
import torch
from kernel_cases import DEVICE

pytest.importorskip("triton")

from mol.ops.kernels.add_up import ROWS, add_up

pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.mark.parametrize("parts", [1, 3, ROWS - 1, ROWS + 5, 3 * ROWS])
@pytest.mark.parametrize("shape", [(1,), (2, 8), (3, 37)])
def test_parts_are_added_up(parts, shape):
    drawn = torch.randn(3, parts, *shape, generator=torch.Generator().manual_seed(parts))
    total = add_up(drawn.to(DEVICE), torch.empty(3, *shape, device=DEVICE)).cpu()
    torch.testing.assert_close(total, drawn.double().sum(1).float(), rtol=1e-5, atol=1e-5)


def test_the_sum_is_of_fp32_numbers_and_rounded_at_its_end():
    drawn = torch.full((2, 512, 5), 1 + 2**-7, device=DEVICE)  # bf16 sums would stay at 256
    assert (add_up(drawn, drawn.new_empty(2, 5, dtype=torch.bfloat16)) == 516).all()
