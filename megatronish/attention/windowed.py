"""Attention in a sliding window on a CPU, in batched products: a band of scores, of which few are hidden.

The queries of a head are cut into blocks. A block of b queries sees the keys of its own places and those of one window
before it: L of them. All bands lie in memory as views of the keys, each b rows further, so several blocks are one
batched product without a copy. One additive mask serves all blocks: it hides the triangle of what comes later, and that
of what is too old.

torch's flash operation (block_sparse.py) would compute the same. It cuts few queries into products too small for a
CPU, and of many it computes more scores that the mask hides than that saves: docs/LOG.md, 2026-11-26, has the times.

Saved for the backward: q, k, v and the output. It computes the probabilities again. What blocks add to the gradient of
a key is summed in the order of the blocks, so equal inputs give equal bits.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish.attention.mask import AttentionMask

SHORT_BLOCK, BLOCK, LONG_WINDOW = 32, 64, 256
"""Queries of a block, BLOCK of them in windows of LONG_WINDOW or more: few hidden scores, and products still quick."""
TOGETHER = 512
"""Queries of a batched product: their scores stay in the cache."""
ALIGNMENT = 8
"""Keys before a block are a multiple of it, so that rows of scores begin where vector loads do."""
LEAST_WINDOW, MOST_OF_SEQUENCE = 64, 4
"""Smaller windows have more hidden scores than seen ones in a band, and of ones longer than a quarter of the sequence
too much lies before its beginning."""


def is_windowed(mask: AttentionMask, q: Tensor) -> bool:
    """Whether these queries attend in a plain window, in a precision that products on a CPU have."""
    if mask.window_size is None or mask.pattern is not None:
        return False
    has_band = LEAST_WINDOW <= mask.window_size <= mask.seq_length // MOST_OF_SEQUENCE
    return has_band and mask.document_ids is None and not mask.slopes and q.dtype in (torch.float32, torch.float64)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """[S, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [S, B, n H]; a token sees `window` keys, itself included."""
    return _WindowedAttention.apply(q, k, v, window)


class _Band(NamedTuple):
    """Sizes of the bands of a sequence, and what is hidden at their ends."""

    window: int
    block: int
    """b, queries of a block."""
    length: int
    """L, keys of a block."""
    num_blocks: int
    hidden: Tensor
    """Added to the scores of a block [b, L]: -inf where a key comes later or is too old."""

    @classmethod
    def of(cls, q: Tensor, window: int) -> "_Band":
        block = SHORT_BLOCK if window < LONG_WINDOW else BLOCK
        length = block + ALIGNMENT * math.ceil((window - 1) / ALIGNMENT)
        distance = torch.arange(block)[:, None] + (length - block) - torch.arange(length)
        hidden = q.new_zeros(block, length).masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        return cls(window, block, length, math.ceil(q.shape[0] / block), hidden)

    @property
    def before(self) -> int:
        """Keys of a band that come before its queries."""
        return self.length - self.block

    @property
    def together(self) -> int:
        """Blocks that are computed together."""
        return TOGETHER // self.block

    def groups(self) -> list[slice]:
        """Blocks, as many as are computed together."""
        return [slice(n, min(n + self.together, self.num_blocks)) for n in range(0, self.num_blocks, self.together)]

    def filled(self, x: Tensor, *, before: int = 0) -> Tensor:
        """[S, ...] -> a whole number of blocks, with zeros at the end, and with so many at the beginning."""
        after = self.num_blocks * self.block - len(x)
        return F.pad(x, (0, 0) * (x.dim() - 1) + (before, after)) if before or after else x.contiguous()

    def blocks(self, x: Tensor) -> Tensor:
        """[blocks b, H] of one head -> views [blocks, b, H]."""
        return x.unflatten(0, (self.num_blocks, self.block))

    def bands(self, x: Tensor) -> Tensor:
        """[before + blocks b, H] of one head -> views [blocks, L, H], which overlap."""
        row, column = x.stride()
        sizes = (self.num_blocks, self.length, x.shape[1])
        return x.as_strided(sizes, (self.block * row, row, column), x.storage_offset())

    def probabilities(self, q: Tensor, k: Tensor, first: int, out: Tensor) -> Tensor:
        """Blocks [g, b, H] from number `first` on, their keys [g, L, H] -> softmax of the scores [g, b, L]."""
        scores = torch.baddbmm(self.hidden, q, k.mT, alpha=1.0 / math.sqrt(q.shape[-1]), out=out[: len(q)])
        for block in range(first, min(first + len(q), math.ceil(self.before / self.block))):
            # Before the beginning of the sequence there are zeros.
            scores[block - first, :, : self.before - block * self.block] = -torch.inf
        return torch._softmax(scores, -1, False, out=scores)

    def add(self, sums: Tensor, terms: Tensor, first: int) -> None:
        """Add terms [g, L, H] of the blocks from `first` on to sums [before + S + b or more, H].

        b rows of a band meet no other band's.
        """
        num_blocks, _, size = terms.shape
        for row in range(0, self.length, self.block):
            part = terms[:, row : row + self.block]
            begin = first * self.block + row
            places = sums[begin : begin + num_blocks * self.block].view(num_blocks, self.block, size)
            places[:, : part.shape[1]].add_(part)


class _WindowedAttention(torch.autograd.Function):
    """One head after the other; [S, B, n, H] queries, [S, B, kv, H] keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        band, out = _Band.of(q, window), q.new_empty(q.shape)
        whole = band.filled(q), band.filled(k, before=band.before), band.filled(v, before=band.before)
        scores = q.new_empty(band.together, band.block, band.length)
        mixed = q.new_empty(band.num_blocks, band.block, q.shape[-1])
        for sample, kv_head, heads in _heads(q, k):
            keys, values = (band.bands(x[:, sample, kv_head]) for x in whole[1:])
            for head in heads:
                queries = band.blocks(whole[0][:, sample, head])
                for group in band.groups():
                    p = band.probabilities(queries[group], keys[group], group.start, scores)
                    torch.bmm(p, values[group], out=mixed[group])
                out[:, sample, head] = mixed.flatten(0, 1)[: len(q)]
        ctx.save_for_backward(q, k, v, out)
        ctx.window = window
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out = ctx.saved_tensors
        band, dout = _Band.of(q, ctx.window), grads[0].reshape(q.shape)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        # The mean of the gradients of a row of probabilities, weighted by them (dropout: operations.py).
        means = band.filled(-(dout * out).sum(-1))
        whole = band.filled(q), band.filled(dout)
        whole_kv = band.filled(k, before=band.before), band.filled(v, before=band.before)
        memory = _BackwardMemory.of(q, band)
        for sample, kv_head, heads in _heads(q, k):
            keys, values = (band.bands(x[:, sample, kv_head]) for x in whole_kv)
            memory.dkeys.zero_()
            memory.dvalues.zero_()
            for head in heads:
                queries, douts = (band.blocks(x[:, sample, head]) for x in whole)
                of_head = band.blocks(means[:, sample, head, None])
                for group in band.groups():
                    first, size = group.start, group.stop - group.start
                    terms = memory.terms[:size]
                    p = band.probabilities(queries[group], keys[group], first, memory.scores)
                    band.add(memory.dvalues, torch.bmm(p.mT, douts[group], out=terms), first)
                    dp = torch.baddbmm(of_head[group], douts[group], values[group].mT, out=memory.grads[:size])
                    ds = dp.mul_(p)
                    torch.bmm(ds, keys[group], out=memory.dqueries[group])
                    band.add(memory.dkeys, torch.bmm(ds.mT, queries[group], out=terms), first)
                scale = 1.0 / math.sqrt(q.shape[-1])
                torch.mul(memory.dqueries.flatten(0, 1)[: len(q)], scale, out=dq[:, sample, head])
            seen = slice(band.before, band.before + len(q))
            torch.mul(memory.dkeys[seen], scale, out=dk[:, sample, kv_head])
            dv[:, sample, kv_head] = memory.dvalues[seen]
        return dq, dk, dv, None


class _BackwardMemory(NamedTuple):
    """Memory that all heads use in turn: new memory costs a CPU more than to write what is there again.

    Gradients of the queries of a head [blocks, b, H], sums of those of its keys and values [before + S + b or more, H];
    of a group of its blocks scores and their gradients [g, b, L], and terms of the sums [g, L, H].
    """

    dqueries: Tensor
    dkeys: Tensor
    dvalues: Tensor
    scores: Tensor
    grads: Tensor
    terms: Tensor

    @classmethod
    def of(cls, q: Tensor, band: _Band) -> "_BackwardMemory":
        size, rows = q.shape[-1], band.before + (band.num_blocks + 1) * band.block
        of_scores = (band.together, band.block, band.length)
        return cls(
            dqueries=q.new_empty(band.num_blocks, band.block, size),
            dkeys=q.new_empty(rows, size),
            dvalues=q.new_empty(rows, size),
            scores=q.new_empty(of_scores),
            grads=q.new_empty(of_scores),
            terms=q.new_empty(band.together, band.length, size),
        )


def _heads(q: Tensor, k: Tensor) -> list[tuple[int, int, range]]:
    """Each sample with each key/value head, and the query heads that share it."""
    samples, kv_heads, shared = k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    return [
        (sample, head, range(head * shared, (head + 1) * shared))
        for sample in range(samples)
        for head in range(kv_heads)
    ]
