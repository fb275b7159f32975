"""The self-check passes here, and fails when a kernel is wrong."""

import json

import pytest
import torch

from mol.cli import main
from mol.ops import selfcheck


def test_all_pass_on_this_cpu(capsys):
    assert main(["selfcheck", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 46 and all(row["passed"] for row in rows)
    assert {row["dtype"] for row in rows} == {"float64", "float32"}
    assert all(row["error"] <= row["tolerance"] < 1e-3 for row in rows)
    assert sum(row["error"] > 0 for row in rows) > 15  # two paths, not one compared with itself


def wrong_gradient(q, k, v, g, beta, cu_seqlens, state=None, final_state=False):
    """Right forward pass; the gradient of the decay is off by 1 %, in fp64 and fp32 alike."""
    g = g + 0.01 * (g - g.detach())
    return selfcheck.naive_gated_delta_rule(q, k, v, g, beta, cu_seqlens, state, final_state)


def raising(*args):
    raise RuntimeError("no kernel\nfor this device")


def gives_nan(q, k, v, g, beta, cu_seqlens, state=None, final_state=False):
    output, final = selfcheck.naive_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens, state, final_state
    )
    return output * torch.nan, final


@pytest.mark.parametrize(
    "kernel, printed, detail",
    [
        (wrong_gradient, "in grad g", ""),
        (raising, "RuntimeError: no kernel for this device", "RuntimeError: no kernel"),
        (gives_nan, "nan", "NaN or infinity in the result"),
    ],
)
def test_wrong_kernels_fail(kernel, printed, detail, monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "gated_delta_rule", kernel)
    comparisons = selfcheck._comparisons
    monkeypatch.setattr(  # the first comparison is the one that is broken here
        selfcheck, "_comparisons", lambda *args: [next(comparisons(*args))]
    )
    assert main(["selfcheck"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  gated delta rule") and printed in out
    assert "0 of 2 passed on cpu" in out
    assert main(["selfcheck", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert not any(row["passed"] for row in rows)
    assert all(row["detail"].startswith(detail) for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device(capsys):
    assert main(["selfcheck", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_pass_on_cuda():
    failed = [check for check in selfcheck.run_checks("cuda") if not check.passed]
    assert not failed
