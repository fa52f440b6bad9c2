"""Sparse attention of whole sequences, block by block: a sliding window or a pattern, without a mask of S x S places.

On a CPU, SDPA with a dense mask computes all scores, those that the mask hides too: a window makes it slower than plain
causal attention. Here the queries are cut into blocks. For each of them the keys that it can see are gathered, one run
after the other, and torch's flash operation computes the block (operations.py). What is seen of these keys only in part
(the own block, which is causal, and the edge of a window) is an additive mask, the same for all blocks: its last
columns, as many as there are keys. Documents and ALiBi have no such mask; theirs is made for a block at a time.

Saved for the backward: q, k, v, the output and one number a row, as in flash attention (Dao et al. 2022,
arXiv:2205.14135). The backward goes through the blocks again, and adds their gradients up in fp32. So both time and
memory grow with the sequence times what a query sees.

With dropout, whose masks are named by places (ops/dropout.py), a block is computed in rectangles of which every query
sees all keys, on any device, and merged by their log-sum-exps as on a ring (ring.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish.attention import tile
from megatronish.attention.dropout_attention import dropped_tile
from megatronish.attention.mask import AttentionMask
from megatronish.attention.operations import TileMask
from megatronish.attention.sinks import gradient_of_sinks, kept
from megatronish.ops.dropout import DroppedTile, ProbabilityDropout
from megatronish.ops.library import accumulation_dtype

QUERIES, LONG_QUERIES, LONG_WINDOW = 64, 192, 256
"""Queries of a block: in windows of LONG_WINDOW or more LONG_QUERIES, which torch's operation cuts into larger tiles.

A score takes 16 ns there in the place of 20, but more scores are masked. Patterns of smaller blocks are computed
several rows at a time.
"""


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[S, B, n, H], [S, B, kv, H], [S, B, kv, H], sinks [n] -> [S, B, n H]; with dropout the mask has a pattern."""
    assert mask.pattern is None or mask.window_size is None, "a pattern has local blocks in the place of a window"
    dropped = None if dropout is None else dropped_tile(dropout, mask, first_head=first_head, device=q.device)
    return _BlockAttention.apply(q, k, v, sinks, _BlockPlan(mask, dropped))


class _GatheredBlock(NamedTuple):
    """Some queries with runs of keys; `is_first` where the queries have met no key before."""

    queries: slice
    keys: tuple[slice, ...]
    tile_mask: TileMask
    is_first: bool = True

    def gathered(self, x: Tensor) -> Tensor:
        """[B, kv, S, H] -> [B, kv, k, H]: the runs, one after the other; one run is not copied."""
        parts = [x[:, :, run] for run in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def scatter(self, sums: Tensor, terms: Tensor) -> None:
        """Add terms [B, kv, k, H] to sums [B, kv, S, H], each to its place."""
        begin = 0
        for run in self.keys:
            end = begin + run.stop - run.start
            sums[:, :, run] += terms[:, :, begin:end]
            begin = end


@dataclass(frozen=True)
class _BlockPlan:
    """Blocks of a whole sequence, the same forward and backward."""

    mask: AttentionMask
    dropped: DroppedTile | None

    def blocks(self, dtype: torch.dtype) -> Iterator[_GatheredBlock]:
        """All blocks, for queries of this dtype."""
        if self.dropped is not None:
            yield from self._rectangles(self.dropped)
            return
        mask = self.mask
        edge = None if mask.slopes or mask.document_ids is not None else self._edge(dtype)
        for queries, runs in _runs_of(mask):
            if edge is not None:
                # Row i and column j of the edge are as far apart as the i-th query and the j-th last key: fewer queries
                # at the end of the sequence have fewer columns on the right, too.
                missing, num_keys = edge.shape[0] - len(queries), sum(map(len, runs))
                stop = edge.shape[1] - missing
                tile_mask = TileMask(bias=edge[: len(queries), stop - num_keys : stop])
            else:
                places, keys = (
                    torch.cat([torch.arange(run.start, run.stop, device=mask.device) for run in each])
                    for each in ([queries], runs)
                )
                tile_mask = TileMask(dense=mask.dense(places, keys), alibi=mask.alibi(places, keys))
            yield _GatheredBlock(_slice(queries), tuple(map(_slice, runs)), tile_mask)

    def _rectangles(self, dropped: DroppedTile) -> Iterator[_GatheredBlock]:
        assert self.mask.pattern is not None, "attention with dropout in a window has blocks of its own"
        whole = range(self.mask.seq_length)
        for queries, keys in self.mask.pattern.pieces(whole, whole):
            here = dropped._replace(first_query=queries.start, first_key=keys.start)
            yield _GatheredBlock(_slice(queries), (_slice(keys),), TileMask(dropped=here), is_first=queries == keys)

    def _edge(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [q, k] of a block of queries and the last keys that it sees, made once; None if there is none.

        Row i is the i-th query of a block, and column k - q + i its own key.
        """
        return self.mask.made_once(("edge", dtype), lambda: _edge_of(self.mask, dtype))


def _runs_of(mask: AttentionMask) -> Iterator[tuple[range, list[range]]]:
    """Each block of queries with the runs of keys that one of its queries sees or more."""
    size, length = _num_queries(mask), mask.seq_length
    for begin in range(0, length, size):
        queries = range(begin, min(begin + size, length))
        if mask.pattern is None:
            assert mask.window_size is not None
            yield queries, [range(max(0, begin - mask.window_size + 1), queries.stop)]
        else:
            yield queries, mask.pattern.runs_of(queries)


def _num_queries(mask: AttentionMask) -> int:
    """Queries of a block."""
    if mask.pattern is not None:
        size = mask.pattern.block_size
        return size * max(1, QUERIES // size)
    assert mask.window_size is not None
    return LONG_QUERIES if mask.window_size >= LONG_WINDOW else QUERIES


def _edge_of(mask: AttentionMask, dtype: torch.dtype) -> Tensor | None:
    size = min(_num_queries(mask), mask.seq_length)
    if mask.pattern is None:
        assert mask.window_size is not None
        before, window = mask.window_size - 1, mask.window_size
    else:
        if size != min(mask.pattern.block_size, mask.seq_length):
            return None  # several rows of a pattern, which see different keys
        before = max(sum(map(len, runs)) - len(queries) for queries, runs in _runs_of(mask))
        window = before + size
    distance = torch.arange(size)[:, None] - torch.arange(-before, size)
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)


class _BlockAttention(torch.autograd.Function):
    """Attention block by block, with a backward of its own. Shapes inside: [B, n, S, H] queries, [B, kv, S, H] keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: _BlockPlan) -> Tensor:
        merged = torch.empty(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        out = rearrange(merged, "s b n h -> b n s h")
        lse = merged.new_empty(out.shape[:3])
        queries, keys, values = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
        for block in plan.blocks(q.dtype):
            mine = queries[:, :, block.queries]
            new = tile.forward(mine, block.gathered(keys), block.gathered(values), tile_mask=block.tile_mask)
            if block.is_first:
                out[:, :, block.queries], lse[:, :, block.queries] = new
            else:
                tile.merge(out[:, :, block.queries], lse[:, :, block.queries], *new)
        ctx.plan = plan
        return kept(ctx, (q, k, v, sinks), out, lse, result=merged.flatten(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, sinks, result, lse = ctx.saved_tensors
        plan: _BlockPlan = ctx.plan
        queries, keys, values = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
        out, dout = (rearrange(x, "s b (n h) -> b n s h", n=q.shape[2]) for x in (result, grads[0]))
        sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        dqueries, dkeys, dvalues = (rearrange(x, "s b n h -> b n s h") for x in sums)
        for block in plan.blocks(q.dtype):
            given = [x[:, :, block.queries] for x in (dout, queries, out, lse)]
            given += [block.gathered(keys), block.gathered(values)]
            terms = tile.backward(*given, tile_mask=block.tile_mask)
            dqueries[:, :, block.queries] += terms.q
            block.scatter(dkeys, terms.k)
            block.scatter(dvalues, terms.v)
        dsinks = gradient_of_sinks(dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return *(grad.to(x.dtype) for grad, x in zip(sums, (q, k, v), strict=True)), dsinks, None
