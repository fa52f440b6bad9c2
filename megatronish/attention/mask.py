"""Attention masks: causal or bidirectional, in a window or a pattern of blocks, within documents; whole or a part.

With ALiBi (attention with linear biases, Press et al. 2022, arXiv:2108.12409) a mask also says how much a key counts:
its score falls by slope x distance, and there are no other positions. Each head has a slope of its own. The slopes of a
power of two of heads are a geometric series; other numbers of heads take the series of the power of two below, and then
every other slope of the series of the power of two above, as the authors' code does.

FlexAttention takes a mask as blocks of scores: those that are computed, and those that need no look inside. torch's
`create_block_mask` evaluates all S x S places. A causal mask with a window and documents follows from less: the first
and the last place of a block, and its least and its greatest document id. Nothing is read back to the host.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

from megatronish.specs.block_pattern import BlockPattern

BlockMask = Literal["nothing", "dense", "causal", "everything"]
"""What a block of queries sees of a block of keys; "dense" where only a dense mask can say."""

CPU = torch.device("cpu")
Made = TypeVar("Made")


@dataclass(frozen=True)
class AttentionMask:
    """Causal mask: a token sees itself and tokens before it, `window_size` at most, of its own document and `pattern`.

    Positions and document ids are those along the whole sequence, whatever part of it a rank holds. In generation the
    tokens before `num_cached` are keys alone: they are in the KV cache.
    """

    causal: ClassVar[bool] = True
    """Whether a token sees no token after it."""

    seq_length: int
    window_size: int | None = None
    document_ids: Tensor | None = None  # int64 [B, S]
    device: torch.device = CPU
    num_cached: int | None = None  # None if there is no cache
    slopes: tuple[float, ...] = ()  # of ALiBi, one for each head that a rank computes
    pattern: BlockPattern | None = None
    # What is made once; torch.compile reads dicts, and no cached_property.
    _wholes: dict[str, Tensor | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    _blocks: dict[str, flex_attention.BlockMask] = field(default_factory=dict, init=False, compare=False, repr=False)
    _parts: dict[range, "AttentionMask"] = field(default_factory=dict, init=False, compare=False, repr=False)
    _variants: dict[tuple[int | None, tuple[float, ...], BlockPattern | None], "AttentionMask"] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _others: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    _longer: dict[int, "AttentionMask"] = field(default_factory=dict, init=False, compare=False, repr=False)

    def variant(
        self, window_size: int | None, slopes: tuple[float, ...], pattern: BlockPattern | None = None
    ) -> "AttentionMask":
        """Mask of the same sequence with window, slopes and pattern, made once: layers that are alike share it."""
        kind = (window_size, slopes, pattern)
        if kind not in self._variants:
            self._variants[kind] = replace(self, window_size=window_size, slopes=slopes, pattern=pattern)
        return self._variants[kind]

    @property
    def first_query(self) -> int:
        """Place of the first query: tokens before it are keys alone."""
        return self.num_cached or 0

    @property
    def in_generation(self) -> bool:
        """Whether there is a KV cache: lengths change from forward to forward, nothing is worth making for one."""
        return self.num_cached is not None

    @property
    def is_plain(self) -> bool:
        """Whether order alone says what a token sees: no ALiBi, no documents, and nothing sparse."""
        return not self.slopes and self.document_ids is None and not self.is_sparse

    def runs_by_blocks(self, device: torch.device) -> bool:
        """Whether block_sparse.py computes attention without dropout: sparse, on a CPU, and not token by token."""
        return device.type == "cpu" and self.is_sparse and not self.in_generation

    @property
    def is_sparse(self) -> bool:
        """Whether there is a window shorter than the sequence, or a pattern that hides a block of it."""
        if self.pattern is not None and not self.pattern.is_whole(self.seq_length):
            return True
        return self.window_size is not None and self.window_size < self.seq_length

    @property
    def is_window(self) -> bool:
        """Whether a token sees a window of tokens before it, and that is all."""
        return self.window_size is not None and not (self.pattern or self.slopes) and self.document_ids is None

    @property
    def needs_dense(self) -> bool:
        """Whether the mask of the whole sequence is more than plain: one query at the end sees all of it."""
        return not (self.is_plain and self.first_query in (0, self.seq_length - 1))

    def dense(self, queries: Tensor, keys: Tensor) -> Tensor:
        """int64 [q], [k] -> bool [1 or B, 1, q, k]: True where a query (row) sees a key (column)."""
        distance = queries.int()[:, None] - keys.int()
        dense = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window_size is not None:
            dense &= distance < self.window_size
        dense = dense[None, None]
        if self.pattern is not None:
            dense = dense & self._in_pattern(self.pattern, queries, keys)
        if self.document_ids is not None:
            rows, columns = self.document_ids[:, None, queries, None], self.document_ids[:, None, None, keys]
            dense = dense & (rows == columns)
        return dense

    def _in_pattern(self, pattern: BlockPattern, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [1 or B, 1, q, k]: whether the pattern shows a key's block to a query's.

        Blocks are counted from the begin of the text, which in generation may be another column in each sample.
        """
        begins = queries.new_zeros(1, 1)
        if self.in_generation and self.document_ids is not None:
            begins = (self.document_ids != self.document_ids[:, -1:]).sum(1, keepdim=True)
        rows, columns = ((places - begins).clamp_min(0) // pattern.block_size for places in (queries, keys))
        return self.layout[rows[:, :, None], columns[:, None, :]].unsqueeze(1)

    @property
    def layout(self) -> Tensor:
        """The pattern of the whole sequence as bool [query blocks, key blocks], made once."""
        assert self.pattern is not None, "a mask without a pattern has no blocks"
        if "layout" not in self._wholes:
            rows = [self.pattern.row(number) for number in range(self.pattern.num_rows(self.seq_length))]
            layout = torch.zeros(len(rows), len(rows), dtype=torch.bool)
            for number, row in enumerate(rows):
                layout[number, list(row)] = True
            self._wholes["layout"] = layout.to(self.device, non_blocking=self.device.type != "cpu")
        made = self._wholes["layout"]
        assert made is not None
        return made

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
            self._blocks["whole"] = block_mask(self)
        return self._blocks["whole"]

    def made_once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for all layers that share the mask, under a name of its own."""
        if name not in self._others:
            self._others[name] = make()
        return self._others[name]

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
            assert self.causal or ids is not None, "without documents every token would see what pads the sequence"
            padded = None if ids is None else F.pad(ids, (0, seq_length - self.seq_length), value=-1)
            self._longer[seq_length] = replace(self, seq_length=seq_length, document_ids=padded)
        return self._longer[seq_length]

    def between(self, queries: range, keys: range) -> BlockMask:
        """Mask of a block: what a run of queries sees of a run of keys.

        With documents it is always "dense": to know where they end, the host would have to wait for the device.
        """
        if not self.causal:
            return "everything" if self.document_ids is None else "dense"
        if queries[-1] < keys[0] or (self.window_size is not None and queries[0] - keys[-1] >= self.window_size):
            return "nothing"
        in_window = self.window_size is None or queries[-1] - keys[0] < self.window_size
        shown = "all" if self.pattern is None else self.pattern.between(queries, keys)
        if shown == "nothing":
            return "nothing"
        if self.document_ids is not None or not in_window or shown == "some":
            return "dense"
        if queries == keys:
            return "causal"
        return "everything" if keys[-1] <= queries[0] else "dense"


@dataclass(frozen=True)
class BidirectionalMask(AttentionMask):
    """Mask of BERT: a token sees all tokens of its own document, so that padding is a document of its own.

    It has neither a window nor ALiBi, no pattern and no KV cache.
    """

    causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        is_plain = self.window_size is None and not self.slopes and self.pattern is None
        assert is_plain and not self.in_generation, "a bidirectional mask has no window, pattern, ALiBi or KV cache"


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of all heads of a layer."""
    below = 1 << (num_heads.bit_length() - 1)
    return (_series(below) + _series(2 * below)[::2])[:num_heads]


def _series(num_heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n), ..., 2^-8, for a power of two."""
    return tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))


def distance_bias(slopes: tuple[float, ...], queries: Tensor, keys: Tensor) -> Tensor:
    """Positions int64 [q], [k] -> what is added to their scores, fp32 [1, n, q, k]."""
    distance = (queries[:, None] - keys).float()
    return slopes_on(slopes, queries.device)[:, None, None] * -distance.unsqueeze(0).unsqueeze(0)


@cache
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Slopes on a device, fp32 [n], copied once; the host does not wait for the copy."""
    return torch.tensor(slopes, dtype=torch.float32).to(device, non_blocking=device.type != "cpu")


BLOCK = 128  # queries, and keys: torch's default


def block_mask(mask: AttentionMask) -> flex_attention.BlockMask:
    """Block mask of a whole sequence, for 1 sample or, with documents int64 [B, S], for B; the same for all heads.

    A block whose documents' ids only overlap is computed, and its mask evaluated. So it is exact for any ids, and skips
    most where ids rise along the sequence.
    """
    seq_length, window_size, document_ids, device = mask.seq_length, mask.window_size, mask.document_ids, mask.device
    # First and last place of each block [S/BLOCK]; the last block may be ragged, which is never "whole".
    first = torch.arange(0, seq_length, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp_max(seq_length - 1)
    is_complete = first + BLOCK <= seq_length
    # [queries, keys] in blocks: some query sees some key; every query sees every key.
    some, whole = last[:, None] >= first, first[:, None] >= last
    if not mask.causal:
        some, whole = torch.ones_like(some), torch.ones_like(whole)
    whole = whole & is_complete[:, None] & is_complete
    if window_size is not None:
        some = some & (first[:, None] - last < window_size)
        whole = whole & (last[:, None] - first < window_size)
    if mask.pattern is not None:
        shown, all_shown = _shown(mask.layout, first // mask.pattern.block_size, last // mask.pattern.block_size)
        some, whole = some & shown, whole & all_shown
    some, whole = some[None], whole[None]
    if document_ids is not None:
        places = torch.arange(len(first) * BLOCK, device=device).clamp_max(seq_length - 1)
        least, greatest = document_ids[:, places].unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
        some = some & (least[:, :, None] <= greatest[:, None]) & (greatest[:, :, None] >= least[:, None])
        whole = whole & (least[:, :, None] == greatest[:, None]) & (greatest[:, :, None] == least[:, None])
    return flex_attention.BlockMask.from_kv_blocks(
        *_ordered(some & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visibility(mask),
        seq_lengths=(seq_length, seq_length),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, q, k] -> of each row of blocks their number [B, 1, q] and their places first [B, 1, q, k], int32."""
    blocks = blocks.unsqueeze(1)
    return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def _shown(layout: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks with these first and last blocks of a pattern [n]: whether any, and whether all of it is shown [n, n].

    Sums over the rectangles of a pattern, from its sums over all rectangles that begin at 0.
    """
    sums = F.pad(layout.int().cumsum(0).cumsum(1), (1, 0, 1, 0))
    begin, end = first, last + 1
    shown = sums[end][:, end] - sums[begin][:, end] - sums[end][:, begin] + sums[begin][:, begin]
    sizes = end - begin
    return shown > 0, shown == sizes[:, None] * sizes


def _visibility(mask: AttentionMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, as FlexAttention asks: for one place of a sample and a head."""
    # Plain values, not the mask: torch.compile looks at what a function closes over.
    causal, window_size, document_ids = mask.causal, mask.window_size, mask.document_ids
    layout, size = (None, 1) if mask.pattern is None else (mask.layout, mask.pattern.block_size)

    def visible(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key if causal else query >= 0
        if window_size is not None:
            seen = seen & (query - key < window_size)
        if document_ids is not None:
            seen = seen & (document_ids[sample, query] == document_ids[sample, key])
        if layout is not None:
            seen = seen & layout[query // size, key // size]
        return seen

    return visible
