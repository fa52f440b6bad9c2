"""Attention in a sliding window on a CPU, in batched products: a band of scores, of which few are hidden.

The queries of a head are cut into blocks. A block of b queries sees the keys of its own places and those of one window
before it: L of them. All bands lie in memory as views of the keys, each b rows further, so several blocks are one
batched product without a copy. Scores that no query of a block may see are masked on the two
ends of the band alone: the triangle of what comes later, and that of what is too old.

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
LEAST_WINDOW = 64
"""Smaller windows have more hidden scores than seen ones in a band."""


def is_windowed(mask: AttentionMask, q: Tensor) -> bool:
    """Whether these queries attend in a plain window, in a precision that products on a CPU have."""
    has_band = mask.window_size is not None and mask.pattern is None and mask.window_size >= LEAST_WINDOW
    return has_band and mask.document_ids is None and not mask.slopes and q.dtype in (torch.float32, torch.float64)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """[S, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [S, B, n H]; a token sees `window` keys, itself included."""
    return _WindowedAttention.apply(q, k, v, window)


class _Band(NamedTuple):
    """Sizes of the bands of one head, and what is hidden at their ends."""

    window: int
    block: int
    """b, queries of a block."""
    length: int
    """L, keys of a block."""
    num_blocks: int
    old: Tensor
    """Added to the first L - window scores of a row: -inf where a key is too old."""
    later: Tensor
    """Added to the last b scores of a row: -inf where a key comes later."""

    @classmethod
    def of(cls, q: Tensor, window: int) -> "_Band":
        block = SHORT_BLOCK if window < LONG_WINDOW else BLOCK
        length = block + ALIGNMENT * math.ceil((window - 1) / ALIGNMENT)
        distance = torch.arange(block)[:, None] + (length - block) - torch.arange(length)
        hidden = q.new_zeros(block, length).masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        # The youngest query of a block sees keys from L - window on: before that column something is hidden.
        old, later = hidden[:, : length - window].contiguous(), hidden[:, length - block :].contiguous()
        return cls(window, block, length, math.ceil(q.shape[0] / block), old, later)

    @property
    def before(self) -> int:
        """Keys of a band that come before its queries."""
        return self.length - self.block

    def groups(self) -> list[slice]:
        """Blocks that are computed together."""
        size = TOGETHER // self.block
        return [slice(n, min(n + size, self.num_blocks)) for n in range(0, self.num_blocks, size)]

    def blocks(self, x: Tensor) -> Tensor:
        """[S, H] of one head -> a copy [blocks, b, H], filled up with zeros."""
        return F.pad(x, (0, 0, 0, self.num_blocks * self.block - len(x))).view(self.num_blocks, self.block, -1)

    def bands(self, x: Tensor) -> Tensor:
        """[S, H] of one head -> views [blocks, L, H] of a copy, with zeros before it as far as a band reaches back."""
        copy = F.pad(x, (0, 0, self.before, self.num_blocks * self.block - len(x)))
        size = copy.shape[1]
        return copy.as_strided((self.num_blocks, self.length, size), (self.block * size, size, 1))

    def probabilities(self, q: Tensor, k: Tensor, first: int, out: Tensor) -> Tensor:
        """Blocks [g, b, H] from number `first` on, their keys [g, L, H] -> softmax of the scores [g, b, L]."""
        scores = torch.bmm(q, k.mT, out=out[: len(q)])
        scores[:, :, : self.length - self.window] += self.old
        scores[:, :, self.before :] += self.later
        for block in range(first, min(first + len(q), math.ceil(self.before / self.block))):
            # Before the beginning of the sequence there are zeros.
            scores[block - first, :, : self.before - block * self.block] = -torch.inf
        return torch._softmax(scores, -1, False, out=scores)

    def new_sums(self, like: Tensor) -> Tensor:
        """Zeros [before + S + b or more, H] for sums of what bands add to their keys."""
        return like.new_zeros(self.before + (self.num_blocks + 1) * self.block, like.shape[-1])

    def add(self, sums: Tensor, terms: Tensor, first: int) -> None:
        """Add terms [g, L, H] of the blocks from `first` on to the sums; b rows of a band meet no other band's."""
        num_blocks, _, size = terms.shape
        for row in range(0, self.length, self.block):
            part = terms[:, row : row + self.block]
            begin = first * self.block + row
            places = sums[begin : begin + num_blocks * self.block].view(num_blocks, self.block, size)
            places[:, : part.shape[1]] += part


class _WindowedAttention(torch.autograd.Function):
    """One head after the other; [S, B, n, H] queries, [S, B, kv, H] keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        band, scale = _Band.of(q, window), 1.0 / math.sqrt(q.shape[-1])
        out = q.new_empty(q.shape)
        scores = q.new_empty(TOGETHER // band.block, band.block, band.length)
        for sample, kv_head, heads in _heads(q, k):
            keys, values = (band.bands(x[:, sample, kv_head]) for x in (k, v))
            for head in heads:
                queries = band.blocks(q[:, sample, head] * scale)
                mixed = torch.empty_like(queries)
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
        band, scale = _Band.of(q, ctx.window), 1.0 / math.sqrt(q.shape[-1])
        dout = grads[0].view(q.shape)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        work = _Work.of(q, band)
        for sample, kv_head, heads in _heads(q, k):
            keys, values = (band.bands(x[:, sample, kv_head]) for x in (k, v))
            dkeys, dvalues = band.new_sums(q), band.new_sums(q)
            for head in heads:
                queries, douts = band.blocks(q[:, sample, head] * scale), band.blocks(dout[:, sample, head])
                # The mean of the gradients of a row of probabilities, weighted by them (dropout: operations.py).
                means = (douts * band.blocks(out[:, sample, head])).sum(-1, keepdim=True).neg_()
                dqueries = torch.empty_like(queries)
                for group in band.groups():
                    first = group.start
                    p = band.probabilities(queries[group], keys[group], first, work.scores)
                    terms = work.terms[: len(p)]
                    band.add(dvalues, torch.bmm(p.mT, douts[group], out=terms), first)
                    ds = torch.baddbmm(means[group], douts[group], values[group].mT, out=work.grads[: len(p)]).mul_(p)
                    torch.bmm(ds, keys[group], out=dqueries[group])
                    band.add(dkeys, torch.bmm(ds.mT, queries[group], out=terms), first)
                dq[:, sample, head] = dqueries.mul_(scale).flatten(0, 1)[: len(q)]
            for grad, sums in ((dk, dkeys), (dv, dvalues)):
                grad[:, sample, kv_head] = sums[band.before : band.before + len(q)]
        return dq, dk, dv, None


class _Work(NamedTuple):
    """Memory of a group of blocks in the backward: scores and their gradients [g, b, L], terms [g, L, H]."""

    scores: Tensor
    grads: Tensor
    terms: Tensor

    @classmethod
    def of(cls, q: Tensor, band: _Band) -> "_Work":
        together = TOGETHER // band.block
        sizes = [(together, band.block, band.length)] * 2 + [(together, band.length, q.shape[-1])]
        return cls(*(q.new_empty(size) for size in sizes))


def _heads(q: Tensor, k: Tensor) -> list[tuple[int, int, range]]:
    """Each sample with each key/value head, and the query heads that share it."""
    samples, kv_heads, shared = k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    return [
        (sample, head, range(head * shared, (head + 1) * shared))
        for sample in range(samples)
        for head in range(kv_heads)
    ]
