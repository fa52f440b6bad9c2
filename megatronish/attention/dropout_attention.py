"""Attention with dropout, block by block: no probabilities are kept, and no mask is ever made.

The queries of a sequence are cut into blocks. Of a block the forward makes the scores with the keys that its queries
can see, turns them in place into dropped probabilities (ops/dropout.py), and multiplies them by the values. Saved for
the backward: q, k, v, the output and one number a row. The backward makes each block's scores again and draws the same
masks again. So memory grows with the sequence and not with its square, as with flash attention (Dao et al. 2022,
arXiv:2205.14135); and blocks are small enough for their scores to stay in a cache, of a CPU's core or of a GPU.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.attention.mask import AttentionMask, slopes_on
from megatronish.attention.operations import EXPLICIT, TileMask
from megatronish.attention.sinks import absorb, gradient_of_sinks
from megatronish.ops.dropout import DroppedTile, ProbabilityDropout
from megatronish.ops.library import Operator, OperatorFamily, accumulation_dtype, define
from megatronish.specs.chunk_sizes import chunk_sizes

FEWEST_QUERIES = 16


def dropped_tile(
    dropout: ProbabilityDropout, mask: AttentionMask, *, first_head: int, device: torch.device
) -> DroppedTile:
    """Dropout and mask of a whole sequence, as one tile."""
    slopes = slopes_on(mask.slopes, device) if mask.slopes else None
    return DroppedTile(
        dropout, first_head, mask.first_query, 0, mask.window_size, mask.document_ids, slopes, causal=mask.causal
    )


def dropped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    first_head: int,
    dropout: ProbabilityDropout,
    sinks: Tensor | None,
) -> Tensor:
    """[q, B, n, H], [S, B, kv, H], [S, B, kv, H], sinks [n] -> [q, B, n H]: queries are the end of the sequence."""
    whole = dropped_tile(dropout, mask, first_head=first_head, device=q.device)
    out, _ = torch.ops.megatronish.dropped_attention(
        *(q, k, v, sinks, *dropout[:2], whole.documents, whole.slopes),
        *(first_head, whole.window_size, whole.causal, dropout.rate),
    )
    return out.flatten(2)


class _Block(NamedTuple):
    """Some samples, a run of queries, and the run of keys that they can see; `tile` of the same."""

    samples: slice
    queries: slice
    keys: slice
    tile: TileMask


def _blocks(q: Tensor, k: Tensor, whole: DroppedTile) -> Iterator[_Block]:
    """All blocks of q [q, B, n, H] and k [S, B, kv, H], in order."""
    (num_queries, batch, heads, _), num_keys = q.shape, k.shape[0]
    first_query, window = num_keys - num_queries, whole.window_size or num_keys
    most, block_queries, *_ = chunk_sizes(q.device.type)
    row_bytes = heads * min(num_keys, window + block_queries) * 4
    step = max(1, min(batch, most // (row_bytes * block_queries)))  # samples
    size = max(FEWEST_QUERIES, min(block_queries, most // row_bytes))
    for sample in range(0, batch, step):
        samples = slice(sample, min(sample + step, batch))
        dropout = whole.dropout._replace(sample_ids=whole.dropout.sample_ids[samples])
        documents = None if whole.documents is None else whole.documents[samples]
        for start in range(0, num_queries, size):
            queries = slice(start, min(start + size, num_queries))
            keys = slice(max(0, first_query + start - window + 1), first_query + queries.stop)
            if not whole.causal:
                keys = slice(0, num_keys)
            tile = whole._replace(
                dropout=dropout, documents=documents, first_query=first_query + start, first_key=keys.start
            )
            yield _Block(samples, queries, keys, TileMask(dropped=tile))


def _by_heads(x: Tensor) -> Tensor:
    """[s, B, n, H] -> [B, n, s, H], in at least fp32 on the CPU, whose products of blocks are fastest in it."""
    x = x if x.is_cuda else x.to(accumulation_dtype(x.dtype))
    return x.permute(1, 2, 0, 3)


def _whole(*given: Any) -> DroppedTile:
    keys, samples, documents, slopes, first_head, window_size, causal, rate = given
    dropout = ProbabilityDropout(keys, samples, rate)
    return DroppedTile(dropout, first_head, 0, 0, window_size, documents, slopes, causal)


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    merged = q.new_empty(q.shape, dtype=accumulation_dtype(q.dtype))
    out = merged.permute(1, 2, 0, 3)
    lse = merged.new_empty(out.shape[:-1])
    queries, keys, values = map(_by_heads, (q, k, v))
    for block in _blocks(q, k, _whole(*given)):
        here, seen = (block.samples, slice(None), block.queries), (block.samples, slice(None), block.keys)
        out[here], lse[here] = EXPLICIT.forward(queries[here], keys[seen], values[seen], block.tile)
    if sinks is not None:
        absorb(out, lse, sinks)
    return merged.to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    dqueries, dkeys, dvalues = (x.permute(1, 2, 0, 3) for x in (dq, dk, dv))
    douts, queries, keys, values, outs = map(_by_heads, (dout, q, k, v, out))
    for block in _blocks(q, k, _whole(*given)):
        here, seen = (block.samples, slice(None), block.queries), (block.samples, slice(None), block.keys)
        grads = EXPLICIT.backward(
            douts[here], queries[here], keys[seen], values[seen], outs[here], lse[here].contiguous(), block.tile
        )
        dqueries[here] = grads.q
        dkeys[seen] += grads.k
        dvalues[seen] += grads.v
    dsinks = lse.new_empty(0) if sinks is None else gradient_of_sinks(douts, outs, lse, sinks)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    length, batch, heads, _size = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=accumulation_dtype(q.dtype))


def _fake_backward(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0, dtype=accumulation_dtype(q.dtype)) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, keys, samples, documents, slopes, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, keys, samples, documents, slopes)


def _gradients(ops: Any, ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks = ops.dropped_attention_backward(dout, *ctx.saved_tensors, *ctx.rest)
    return dq, dk, dv, None if ctx.saved_tensors[3] is None else dsinks, *[None] * 8


_GIVEN = (
    "Tensor keys, Tensor samples, Tensor? documents, Tensor? slopes, int first_head, int? window_size, bool causal, "
    "float rate"
)
FAMILY = OperatorFamily(
    "dropped_attention",
    (
        Operator(
            f"dropped_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_GIVEN}) -> (Tensor out, Tensor lse)",
            reference=_forward,
            fake=_fake_forward,
            triton="attention.forward",
            setup_context=_save,
            backward=_gradients,
        ),
        Operator(
            "dropped_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, "
            f"Tensor lse, {_GIVEN}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
            reference=_backward,
            fake=_fake_backward,
            triton="attention.backward",
        ),
    ),
    in_cuda=False,
)
define(FAMILY)
