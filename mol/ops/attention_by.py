"""Which library computes softmax attention, where torch's own choice is not wanted.

with attention_by("flash_attn"):
    hidden = model(ids_BT).hidden
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mol.ops.tracing import untraced

PACKAGE = "flash_attn"
# By torch's names for them; its "flash" is FlashAttention-2.
BACK_ENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_by_package: list[bool] = []  # not empty inside `attention_by(PACKAGE)`


@contextmanager
def attention_by(back_end: str) -> Iterator[None]:
    """Inside, causal attention over segments runs by one of `BACK_ENDS`, or by the package
    `flash_attn` (extra `flash-attn`; bf16 or fp16 on CUDA).

    ImportError where the package is not installed. A call whose tensors the back end does not take
    raises RuntimeError. Steps in a cache are not affected.
    """
    if back_end != PACKAGE:
        with sdpa_kernel(BACK_ENDS[back_end]):
            yield
        return
    if importlib.util.find_spec(PACKAGE) is None:
        raise ImportError("flash-attn is not installed; pip install 'mol[flash-attn]'")
    _by_package.append(True)
    try:
        yield
    finally:
        _by_package.pop()


def by_package() -> bool:
    """Whether the package was asked for."""
    return bool(_by_package)


@untraced
def flash_attn(
    q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, cu_seqlens: Tensor, longest: int
) -> Tensor:
    """`mol.ops.attention.segment_attention` by the package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    segments = cu_seqlens.numel() - 1
    if segments * longest == q_NHd.shape[0]:
        batch = (t.unflatten(0, (segments, longest)) for t in (q_NHd, k_NHd, v_NHd))
        return flash_attn_func(*batch, causal=True).flatten(0, 1)
    return flash_attn_varlen_func(
        q_NHd, k_NHd, v_NHd, cu_seqlens, cu_seqlens, longest, longest, causal=True
    )
