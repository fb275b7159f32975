"""Where the tokens of padded rows stand.

Shape suffixes: B rows, T columns, x any further dimensions.
"""

import torch
from torch import Tensor


def turned(x_BTx: Tensor, by_B: Tensor) -> Tensor:
    """Row b with its column `by_B[b]` first and those before it behind the last."""
    column_T = torch.arange(x_BTx.shape[1], device=x_BTx.device)
    from_BT = (column_T + by_B[:, None]) % x_BTx.shape[1]
    return x_BTx[torch.arange(len(x_BTx), device=x_BTx.device)[:, None], from_BT]


def real_columns(mask_BT: Tensor | None, ids_BT: Tensor) -> tuple[Tensor, Tensor] | None:
    """First real column of each row and how many there are, or None without padding.
    Raises ValueError unless the real columns of each row stand side by side."""
    if mask_BT is None:
        return None
    if mask_BT.shape != ids_BT.shape:
        raise ValueError(
            f"attention_mask: shape {tuple(mask_BT.shape)} is not that of input_ids, "
            f"{tuple(ids_BT.shape)}"
        )
    real_BT = mask_BT.to(ids_BT.device).bool()
    if real_BT.all():
        return None
    first_B, length_B = real_BT.int().argmax(1), real_BT.sum(1)
    if not length_B.all():
        raise ValueError("attention_mask: a row has no token")
    column_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    last_B = first_B + length_B
    if not (real_BT == ((column_T >= first_B[:, None]) & (column_T < last_B[:, None]))).all():
        raise ValueError("attention_mask: zeros between tokens; pad at the ends of a row only")
    return first_B, length_B


def foreseen(labels_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Labels with -100 where padding stands before: what a column of padding holds is no token's,
    and may have seen the text. `mask_BT` may begin with columns that a cache holds."""
    if mask_BT is None:
        return labels_BT
    before_BT = mask_BT[:, -labels_BT.shape[1] :].to(labels_BT.device)[:, :-1].bool()
    return torch.cat([labels_BT[:, :1], labels_BT[:, 1:].masked_fill(~before_BT, -100)], 1)
