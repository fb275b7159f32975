"""Softmax attention by a library that is named: torch's back ends, and the flash-attn package."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mol.ops.attention import segment_attention, segment_attention_reference
from mol.ops.attention_by import attention_by

LENGTHS = {"equal": (7, 7, 7), "packed": (3, 0, 9, 1)}


def segments(lengths, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    qkv = torch.randn(3, sum(lengths), 2, 64, device=device, dtype=dtype)
    return qkv.requires_grad_(), cu_seqlens, max(lengths)


class Package(ModuleType):
    """The package's two functions by torch, in their layout: [S, L, H, d], and packed rows."""

    def __init__(self):
        super().__init__("flash_attn")
        self.called = []

    def flash_attn_func(self, q, k, v, causal=False):
        self.called.append("equal")
        rows = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=causal).transpose(1, 2)

    def flash_attn_varlen_func(self, q, k, v, cu_q, cu_k, longest_q, longest_k, causal=False):
        self.called.append("packed")
        assert causal and torch.equal(cu_q, cu_k) and longest_q == longest_k == 9
        return segment_attention_reference(q, k, v, cu_q)


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_package_gets_rows_in_its_layout(kind, monkeypatch):
    package = Package()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn")
    qkv, cu_seqlens, longest = segments(LENGTHS[kind])
    expected = segment_attention_reference(*qkv, cu_seqlens)
    with attention_by("flash_attn"):
        found = segment_attention(*qkv, cu_seqlens, longest)
    assert package.called == [kind]
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((o * weights).sum(), qkv)[0] for o in (found, expected))
    torch.testing.assert_close(*gradients)
    segment_attention(*qkv, cu_seqlens, longest)
    assert package.called == [kind], "only inside"


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="is installed")
def test_without_the_package_the_error_says_how_to_get_it():
    with pytest.raises(ImportError, match=r"pip install 'mol\[flash-attn\]'"):
        with attention_by("flash_attn"):
            pass
    qkv, cu_seqlens, longest = segments(LENGTHS["equal"])
    segment_attention(*qkv, cu_seqlens, longest)  # not asked for any more


def test_a_back_end_of_torch_is_the_only_one_inside():
    qkv, cu_seqlens, longest = segments(LENGTHS["equal"])
    expected = segment_attention_reference(*qkv, cu_seqlens)
    with attention_by("flash"):
        torch.testing.assert_close(segment_attention(*qkv, cu_seqlens, longest), expected)
    with attention_by("cudnn"), pytest.raises(RuntimeError, match="No viable backend"):
        segment_attention(*qkv, cu_seqlens, longest)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("back_end", ["cudnn", "flash", "efficient", "flash_attn"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_on_a_gpu_each_agrees_with_the_reference(back_end, kind):
    if back_end == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    qkv, cu_seqlens, longest = segments(LENGTHS[kind], "cuda", torch.bfloat16)
    wide = qkv.detach().double().requires_grad_()
    expected = segment_attention_reference(*wide, cu_seqlens)
    with attention_by(back_end):
        found = segment_attention(*qkv, cu_seqlens, longest)
    weights = torch.randn_like(expected)
    gradient, right = (
        torch.autograd.grad((o * weights.to(o)).sum(), x)[0]
        for o, x in ((found, qkv), (expected, wide))
    )
    for one, other in ((found, expected), (gradient, right)):
        assert (one.double() - other).norm() < 1e-2 * other.norm()
