"""Attention masks: causal, within a sliding window and within documents, for a whole sequence or blocks of it.

With ALiBi a mask also says how much a key counts: its score falls with its distance, for each head by another slope.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

from megatronish.attention.alibi import distance_bias
from megatronish.attention.block_mask import block_mask

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
    slopes: tuple[float, ...] = ()  # of ALiBi, one for each head that a rank computes
    in_generation: bool = False  # lengths change from forward to forward: nothing is worth making for one of them
    # What is made once; torch.compile reads dicts, and no cached_property.
    _wholes: dict[str, Tensor | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    _blocks: dict[str, flex_attention.BlockMask] = field(default_factory=dict, init=False, compare=False, repr=False)
    _parts: dict[range, "AttentionMask"] = field(default_factory=dict, init=False, compare=False, repr=False)
    _variants: dict[tuple[int | None, tuple[float, ...]], "AttentionMask"] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _longer: dict[int, "AttentionMask"] = field(default_factory=dict, init=False, compare=False, repr=False)

    def variant(self, window_size: int | None, slopes: tuple[float, ...]) -> "AttentionMask":
        """Mask of the same sequence with this window and these slopes, made once: layers that are alike share it."""
        kind = (window_size, slopes)
        if kind not in self._variants:
            self._variants[kind] = replace(self, window_size=window_size, slopes=slopes)
        return self._variants[kind]

    @property
    def is_causal(self) -> bool:
        """Whether the mask is plain causal: no ALiBi, no documents, and no window shorter than the sequence."""
        return not self.slopes and self.document_ids is None and not self._windowed

    @property
    def _windowed(self) -> bool:
        return self.window_size is not None and self.window_size < self.seq_length

    @property
    def needs_dense(self) -> bool:
        """Whether the mask of the whole sequence is more than plain causal: one query at the end sees all of it."""
        return not (self.is_causal and self.first_query in (0, self.seq_length - 1))

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

    @property
    def whole(self) -> Tensor | None:
        """Dense mask of the whole sequence, bool [1 or B, 1, q, S], made once; None where none is needed."""
        if not self.needs_dense:
            return None
        if "dense" not in self._wholes:
            self._wholes["dense"] = self.dense(*self._all_places())
        return self._wholes["dense"]

    def _all_places(self) -> tuple[Tensor, Tensor]:
        """Queries and keys of the whole sequence."""
        positions = torch.arange(self.seq_length, device=self.device)
        return positions[self.first_query :], positions

    @property
    def blocks(self) -> flex_attention.BlockMask:
        """The same for FlexAttention, without ALiBi, made once: blocks of scores in place of a dense mask."""
        assert self.first_query == 0, "a block mask is that of a whole sequence"
        if "whole" not in self._blocks:
            made = block_mask(self.seq_length, self.window_size, self.document_ids, device=self.device)
            self._blocks["whole"] = made
        return self._blocks["whole"]

    def alibi(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """int64 [q], [k] -> what ALiBi adds to their scores, fp32 [1, n, q, k]; None without ALiBi."""
        return distance_bias(self.slopes, queries, keys) if self.slopes else None

    @property
    def whole_alibi(self) -> Tensor | None:
        """`alibi` of the whole sequence, [1, n, q, S], made once."""
        if "alibi" not in self._wholes:
            self._wholes["alibi"] = self.alibi(*self._all_places())
        return self._wholes["alibi"]

    def whole_bias(self, dtype: torch.dtype) -> Tensor:
        """Additive mask of the whole sequence, [1 or B, n, q, S]: ALiBi, and -inf where a query sees nothing.

        It is made once for all layers that share the mask.
        """
        if dtype not in self._biases:
            bias, seen = self.alibi(*self._all_places()), self.whole
            assert bias is not None and seen is not None, "only ALiBi needs numbers"
            self._biases[dtype] = bias.to(dtype).masked_fill(~seen, -torch.inf)
        return self._biases[dtype]

    def for_heads(self, heads: range) -> "AttentionMask":
        """Mask of some of the heads, made once."""
        if not self.slopes:
            return self
        if heads not in self._parts:
            self._parts[heads] = replace(self, slopes=self.slopes[heads.start : heads.stop])
        return self._parts[heads]

    def longer(self, seq_length: int) -> "AttentionMask":
        """Mask of a sequence that is padded at its end, made once; what pads it is a document of its own."""
        if seq_length == self.seq_length:
            return self
        if seq_length not in self._longer:
            ids = self.document_ids
            padded = None if ids is None else F.pad(ids, (0, seq_length - self.seq_length), value=-1)
            self._longer[seq_length] = replace(self, seq_length=seq_length, document_ids=padded)
        return self._longer[seq_length]

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
