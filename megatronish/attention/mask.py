"""Attention masks: causal, within a sliding window and within documents, for a whole sequence or blocks of it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

BlockMask = Literal["nothing", "dense", "causal", "everything"]
"""What a block of queries sees of a block of keys; "dense" where only a dense mask can say."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class AttentionMask:
    """Causal mask: a token sees itself and the tokens before it, `window_size` at most, of its own document.

    Positions and document ids are those along the whole sequence, whatever part of it a rank holds.
    """

    seq_length: int
    window_size: int | None = None
    document_ids: Tensor | None = None  # int64 [B, S]
    device: torch.device = CPU
    first_query: int = 0  # tokens before it are keys alone: they are in the KV cache

    @property
    def is_causal(self) -> bool:
        """Whether the mask is plain causal: no documents, and no window that is shorter than the sequence."""
        return self.document_ids is None and not self._windowed

    @property
    def _windowed(self) -> bool:
        return self.window_size is not None and self.window_size < self.seq_length

    def dense(self, queries: Tensor, keys: Tensor) -> Tensor:
        """int64 [q], [k] -> bool [1 or B, 1, q, k]: True where a query (row) sees a key (column)."""
        distance = queries.int()[:, None] - keys.int()
        dense = distance >= 0
        if self.window_size is not None:
            dense &= distance < self.window_size
        dense = dense[None, None]
        if self.document_ids is not None:
            rows, columns = self.document_ids[:, None, queries, None], self.document_ids[:, None, None, keys]
            dense = dense & (rows == columns)
        return dense

    @cached_property
    def whole(self) -> Tensor | None:
        """Dense mask of the whole sequence, bool [1 or B, 1, q, S], made once; None where attention is plain causal.

        Attention of a single query at the end, which sees all, needs none either.
        """
        if self.is_causal and self.first_query in (0, self.seq_length - 1):
            return None
        positions = torch.arange(self.seq_length, device=self.device)
        return self.dense(positions[self.first_query :], positions)

    def between(self, queries: range, keys: range) -> BlockMask:
        """Mask of a block: what a run of queries sees of a run of keys.

        With documents it is always "dense": to know where they end, the host would have to wait for the device.
        """
        if queries[-1] < keys[0] or (self.window_size is not None and queries[0] - keys[-1] >= self.window_size):
            return "nothing"
        in_window = self.window_size is None or queries[-1] - keys[0] < self.window_size
        if self.document_ids is not None or not in_window:
            return "dense"
        if queries == keys:
            return "causal"
        return "everything" if keys[-1] <= queries[0] else "dense"
