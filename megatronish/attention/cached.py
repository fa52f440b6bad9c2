"""What does attention keep of the tokens it has seen, so that the next one need not compute them again?

Keys and values, turned and normalised as attention reads them: of this rank's layers, and of its own kv heads. The
tokens of a batch stand in columns; those of a shorter text begin later, and what is left of them is hidden from them as
another document would be (visibility.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class _LayerCache(NamedTuple):
    keys: Tensor  # [capacity, B, k, H]
    values: Tensor


class KeyValueCache:
    """Room for `capacity` columns. Layers add theirs during a forward; `advance` says that it is over."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_columns = capacity, 0
        self._layers: dict[int, _LayerCache] = {}

    @property
    def is_full(self) -> bool:
        """Whether no column is left."""
        return self.num_columns == self.capacity

    def extended(self, k: Tensor, v: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        """Keep [s, B, k, H], [s, B, k, H] of the newest columns -> the same of all columns so far, these included."""
        if layer not in self._layers:
            room = (self.capacity, *k.shape[1:])
            self._layers[layer] = _LayerCache(k.new_empty(room), v.new_empty(room))
        start, stop = self.num_columns, self.num_columns + k.shape[0]
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            kept[start:stop] = new
        keys, values = self._layers[layer]
        return keys[:stop], values[:stop]

    def advance(self, num_columns: int) -> None:
        """Every layer has added so many columns."""
        self.num_columns += num_columns

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows of the batch but these."""
        self._layers = {layer: _LayerCache(*(x[:, rows] for x in kept)) for layer, kept in self._layers.items()}
