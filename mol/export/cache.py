"""The decoding state of a MoL model behind transformers' cache interface.

Shape suffixes: B sequences, E blocks of a layer, S segments (block * B + sequence).
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache

from mol.model.transformer import Cache as Held
from mol.model.transformer import LanguageModel

ROOM = 64  # positions of the smallest cache; more are had by doubling


def room_for(length: int) -> int:
    """Positions to reserve for `length` tokens and at least one more: a power of two."""
    return max(ROOM, 1 << length.bit_length())


def _mapped(function: Callable[..., Tensor], *layers):
    """`function` of the corresponding tensors of equally built layer caches."""
    first = layers[0]
    if isinstance(first, Tensor):
        return function(*layers)
    if not dataclasses.is_dataclass(first):
        return first
    fields = (field.name for field in dataclasses.fields(first))
    return type(first)(*(_mapped(function, *(getattr(c, f) for c in layers)) for f in fields))


class MoLCache(Cache):
    """Keys, values and states of every layer; grows on demand; starts empty.

    A row holds its real tokens only: `pads_B` of the `columns` seen so far were padding (None:
    of no row). Segments of the layers can be selected, so beam search can reorder them. A state
    of the delta rule cannot be wound back, so nothing can be cropped.
    """

    def __init__(self):
        super().__init__(layers=[])
        self.held: Held | None = None
        self.columns = 0
        self.pads_B: Tensor | None = None

    def fill(self, held: Held, columns: int) -> None:
        """Take over what a prompt left, all rows without padding."""
        held.layers = [_mapped(Tensor.detach, layer) for layer in held.layers]
        self.held, self.columns, self.pads_B = held, columns, None

    def join(self, parts: Sequence[Held], rows: Sequence[Tensor], pads_B: Tensor, columns: int):
        """Take over several caches of equal `max_len`: `rows[i]` are the rows of `parts[i]`."""
        sizes = [len(part) for part in rows]
        order_B = torch.cat(list(rows)).argsort()

        def together(*tensors: Tensor) -> Tensor:
            pairs = zip(tensors, sizes, strict=True)
            by_block = [t.unflatten(0, (-1, size)) for t, size in pairs]
            return torch.cat(by_block, 1).index_select(1, order_B).flatten(0, 1)

        layers = [
            _mapped(together, *layers)
            for layers in zip(*(part.layers for part in parts), strict=True)
        ]
        self.fill(Held(layers, len(order_B), parts[0].max_len), columns)
        self.pads_B = pads_B
        self.held.position = columns - pads_B  # of each row: rows are of unlike length

    def make_room(self, model: LanguageModel, more: int) -> None:
        """Reserve places for `more` tokens."""
        if self.columns + more <= self.held.max_len:
            return
        larger = model.new_cache(self.n_rows, room_for(self.columns + more))

        def copy(new: Tensor, old: Tensor) -> Tensor:
            new[tuple(slice(0, size) for size in old.shape)] = old
            return new

        pairs = zip(larger.layers, self.held.layers, strict=True)
        larger.layers = [_mapped(copy, new, old) for new, old in pairs]
        larger.position = self.held.position
        self.held = larger

    def _select(self, rows: Tensor) -> None:
        if self.held is None:
            return
        held = self.held.branch(rows)
        if self.pads_B is not None:
            self.pads_B = self.pads_B[rows]
            held.position = self.columns - self.pads_B
        self.held = held

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(self.n_rows, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.n_rows).repeat_interleave(repeats))

    def reset(self) -> None:
        self.__init__()

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless nothing is to be removed."""
        if tokens_to_remove:
            raise ValueError("a MoLCache cannot forget tokens: feed the shorter text to a new one")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included, as transformers counts."""
        return self.columns

    def get_max_length(self, layer_idx: int = 0) -> int:
        return -1  # no bound

    def __repr__(self) -> str:
        return f"MoLCache({self.n_rows} rows, {self.columns} columns)"

    def __len__(self) -> int:
        return len(self.held.layers) if self.held else 0

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    @property
    def n_rows(self) -> int:
        return self.held.batch if self.held else 0

    @property
    def batch_size(self) -> int:
        return self.n_rows or -1

    @property
    def is_initialized(self) -> bool:
        return self.held is not None

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # its length is known, which is what transformers asks this for

    @property
    def is_croppable(self) -> bool:
        return False
