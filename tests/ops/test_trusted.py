"""Before a GPU is relied on: wrong kernels are refused, a pass is remembered, a failure is not."""

from dataclasses import replace

import pytest
import torch

from mol.base import UserError
from mol.ops import trusted
from mol.ops.selfcheck import Check

GPU = torch.device("cuda")
GOOD = Check("one-pass stage", "cuda", "bfloat16", 1e-3, 5e-2, "output 0")
BETTER = replace(GOOD, name="delta rule", error=1e-4)


@pytest.fixture
def outcome(monkeypatch, tmp_path):
    """The checks that the next self-check finds; counts how often it ran."""
    found = {"checks": [GOOD, BETTER], "runs": 0}

    def run_checks(device):
        found["runs"] += 1
        return found["checks"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trusted, "run_checks", run_checks)
    monkeypatch.setattr(trusted, "_key", lambda device: "this-code-and-machine")
    return found


@pytest.mark.parametrize("error", [0.4, float("nan"), None])
def test_wrong_kernels_are_refused_every_time(outcome, error):
    outcome["checks"] = [GOOD, replace(GOOD, name="delta rule", error=error)]
    for runs in (1, 2):
        with pytest.raises(UserError, match="self-check failed on this GPU: delta rule; refused"):
            trusted.check_kernels(GPU)
        assert outcome["runs"] == runs
    outcome["checks"] = [GOOD]
    assert len(trusted.check_kernels(GPU)) == 1


def test_a_pass_is_remembered_and_names_what_is_nearest_to_its_tolerance(outcome, monkeypatch):
    (note,) = trusted.check_kernels(GPU)
    assert note.startswith("self-check: 2 of 2 passed") and "one-pass stage, 1.0e-03" in note
    outcome["checks"] = [replace(GOOD, error=1.0)]  # not asked again
    assert trusted.check_kernels(GPU) == [note] and outcome["runs"] == 1
    monkeypatch.setattr(trusted, "_key", lambda device: "other-code")
    with pytest.raises(UserError, match="refused"):
        trusted.check_kernels(GPU)


@pytest.mark.parametrize("content", ["", "{}", "[]", '"x"', "\x00"])
def test_a_damaged_memory_is_no_pass(outcome, content):
    trusted.check_kernels(GPU)
    (file,) = trusted._cache_folder().iterdir()
    file.write_text(content)
    assert trusted.check_kernels(GPU)[0].startswith("self-check: 2 of 2") and outcome["runs"] == 2


def test_a_cpu_is_not_asked(outcome):
    assert trusted.check_kernels(torch.device("cpu")) == [] and outcome["runs"] == 0
