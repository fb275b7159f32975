"""Without a GPU Triton's kernels run in its interpreter, which must be chosen before its import."""

import importlib.util
import os

import pytest
import torch


def _accept_new_numpy():
    """Triton 3.6 turns the bounds of a loop into int by `int(array)`, which NumPy 2.4 refuses
    for the interpreter's arrays of one element."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _multiply_bf16():
    """Triton 3.6's interpreter holds bf16 as 16-bit integers, and its products multiply those."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (self.cast_impl(t, float32) if t.dtype == bfloat16 else t for t in (a, b))
        return multiply(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        _accept_new_numpy()
        _multiply_bf16()


@pytest.fixture
def nan_memory():
    """Whatever is allocated without a value holds NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def long_programs(monkeypatch):
    """As many tiles a program as there are, as with a thousand times the rows."""
    from mol.ops.kernels import shares

    monkeypatch.setattr(shares, "PROGRAMS", 1)
