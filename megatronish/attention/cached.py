"""KV cache: keys and values of the tokens so far, for generation token by token.

They are kept as attention reads them, rotated and normalised, of this rank's layers and key/value heads; of latent
attention there is one latent for all heads, and no values (model/latent_attention.py). The texts of a batch end in the
same column; a shorter text begins in a later one, and the columns before it are masked as another document would be
(mask.py). Of a model with an encoder the columns are those of its decoder; the keys and values that cross attention has
of the encoder's text are kept from the first forward on, with the mask of its filler.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _LayerCache(NamedTuple):
    """Keys and values of one layer, with room for all columns."""

    keys: Tensor  # [capacity, B, k, H]
    values: Tensor


class KeyValueCache:
    """KV cache of `capacity` columns. Layers add theirs during a forward; `advance` ends the forward."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_columns = capacity, 0
        self._layers: dict[int, _LayerCache] = {}
        self._of_encoder: dict[int, _LayerCache] = {}
        self.text: Tensor | None = None
        """bool [B, 1, 1, Se]: where the encoder's rows have text; None where they have nothing else."""

    @property
    def is_full(self) -> bool:
        """Whether no column is left."""
        return self.num_columns == self.capacity

    def extended(self, k: Tensor, v: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [s, B, k, H] of the newest columns, and return those of all columns so far."""
        if layer not in self._layers:
            self._layers[layer] = _LayerCache(*(x.new_empty(self.capacity, *x.shape[1:]) for x in (k, v)))
        start, stop = self.num_columns, self.num_columns + k.shape[0]
        for kept, new in zip(self._layers[layer], (k, v), strict=True):
            kept[start:stop] = new
        keys, values = self._layers[layer]
        return keys[:stop], values[:stop]

    def of_encoder(self, k: Tensor, v: Tensor, *, layer: int) -> tuple[Tensor, Tensor]:
        """Keep keys and values [Se, B, k, H] of the encoder's text, or, where these have no rows, return those kept."""
        if len(k):
            self._of_encoder[layer] = _LayerCache(k, v)
        return self._of_encoder[layer]

    def advance(self, num_columns: int) -> None:
        """End a forward in which every layer has added this many columns."""
        self.num_columns += num_columns

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows of the batch but these. Their numbers go to the device once, and the host waits for nothing."""
        if not self._layers:
            return
        device = next(iter(self._layers.values())).keys.device
        numbers = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        self._layers, self._of_encoder = (
            {layer: _LayerCache(*(x.index_select(1, numbers) for x in kept)) for layer, kept in layers.items()}
            for layers in (self._layers, self._of_encoder)
        )
        self.text = None if self.text is None else self.text.index_select(0, numbers)
