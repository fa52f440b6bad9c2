"""Which keys does a query see? Itself and what came before it, within its window and its document."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

BlockMask = Literal["nothing", "dense", "causal", "everything"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class AttentionMask:
    """A token sees itself and what came before it, at most `window_size` tokens in all, within its own document.

    Positions are those along the whole sequence, whatever part of it a rank holds; so are the document ids.
    """

    seq_length: int
    window_size: int | None = None
    document_ids: Tensor | None = None  # int64 [B, S]
    device: torch.device = CPU
    first_query: int = 0  # those before it are keys alone: their own forward is over

    @property
    def is_causal(self) -> bool:
        """Whether order alone decides."""
        return self.document_ids is None and not self._windowed

    @property
    def _windowed(self) -> bool:
        return self.window_size is not None and self.window_size < self.seq_length

    def dense(self, queries: Tensor, keys: Tensor) -> Tensor:
        """int64 [q], [k] -> bool [1 or B, 1, q, k]: True where a query (row) sees a key (column)."""
        distance = queries.int()[:, None] - keys.int()
        visible = distance >= 0
        if self.window_size is not None:
            visible &= distance < self.window_size
        visible = visible[None, None]
        if self.document_ids is not None:
            rows, columns = self.document_ids[:, None, queries, None], self.document_ids[:, None, None, keys]
            visible = visible & (rows == columns)
        return visible

    @cached_property
    def whole(self) -> Tensor | None:
        """bool [1 or B, 1, q, S] for the whole sequence, made once; None where attention is plain causal.

        It is so for a single query at the end, too, which sees all.
        """
        if self.is_causal and self.first_query in (0, self.seq_length - 1):
            return None
        positions = torch.arange(self.seq_length, device=self.device)
        return self.dense(positions[self.first_query :], positions)

    def between(self, queries: range, keys: range) -> BlockMask:
        """What one run of positions sees of another: "mask" where it takes a mask to say.

        Documents always take one: to know where they end, a GPU would have to be waited for.
        """
        if queries[-1] < keys[0] or (self.window_size is not None and queries[0] - keys[-1] >= self.window_size):
            return "nothing"
        in_window = self.window_size is None or queries[-1] - keys[0] < self.window_size
        if self.document_ids is not None or not in_window:
            return "dense"
        if queries == keys:
            return "causal"
        return "everything" if keys[-1] <= queries[0] else "dense"
