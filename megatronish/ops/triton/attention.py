"""Flash attention with dropout (Dao et al. 2022, arXiv:2205.14135): no scores, no probabilities and no mask in memory.

The mask of a probability is the hash of its global place, as on a CPU (dropout.py), so every device draws the same one.
Forward: a program has some queries of a head and runs over the keys that they see. Backward: one kernel has some keys
of a key/value head, and runs over the queries of all heads that share it; another has some queries. So no sum is
shared by two programs, and there are no atomics: the same bits in every run.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatronish.ops.triton.dropout import kept, logits_of, sight_of

LARGEST_HEAD = 256
MOST_PROGRAMS = 65535  # of the second dim of a grid
SMALLEST_BLOCK = 16  # that a product of matrices takes


class BlockSizes(NamedTuple):
    """Queries and keys of a program at once, its warps, and how many loads are ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


def forward_blocks(channels: int, element_bytes: int) -> BlockSizes:
    """By head size (a power of two) and bytes of an element: as large as registers and 99 KB of shared memory allow."""
    if element_bytes == 4:
        return BlockSizes(32, 32, 4, 1) if channels <= 64 else BlockSizes(32 if channels <= 128 else 16, 16, 4, 1)
    if channels <= 64:
        return BlockSizes(128, 64, 8, 2)
    return BlockSizes(128, 32, 8, 2) if channels <= 128 else BlockSizes(64, 32, 8, 2)


def backward_blocks(channels: int, element_bytes: int) -> BlockSizes:
    """As `forward_blocks`: a backward has two sums of a block's rows in registers."""
    if element_bytes == 4:
        return BlockSizes(32, 32, 4, 1) if channels <= 64 else BlockSizes(16, 16, 8, 1)
    if channels <= 64:
        return BlockSizes(64, 64, 8, 1)
    return BlockSizes(32, 64, 8, 1) if channels <= 128 else BlockSizes(32, 32, 8, 1)


class Heads(NamedTuple):
    """Tensor [s, B, n, H] whose channels are neighbours, and its strides."""

    base: Any
    s: Any
    b: Any
    n: Any


class Sizes(NamedTuple):
    """Samples, query heads, query heads that share a key/value head, and lengths: queries are the last of the keys."""

    batch: Any
    heads: Any
    group: Any
    num_queries: Any
    num_keys: Any


class Shape(NamedTuple):
    """Channels of a head, the power of two that holds them, and the block of a program."""

    size: int
    channels: int
    queries: int
    keys: int


@triton.jit
def _rows(x, index, sample, head, count, SHAPE: tl.constexpr):
    """Positions `index` [i] of a head -> [i, channels]; 0 beyond its end."""
    channel = tl.arange(0, SHAPE.channels)[None, :]
    here = x.base + sample.to(tl.int64) * x.b + tl.cast(head, tl.int64) * x.n + index[:, None].to(tl.int64) * x.s
    return tl.load(here + channel, mask=(index[:, None] < count) & (channel < SHAPE.size), other=0.0)


@triton.jit
def _store(x, values, index, sample, head, count, SHAPE: tl.constexpr):
    """Write what `_rows` reads, in the dtype of the tensor."""
    channel = tl.arange(0, SHAPE.channels)[None, :]
    here = x.base + sample.to(tl.int64) * x.b + tl.cast(head, tl.int64) * x.n + index[:, None].to(tl.int64) * x.s
    mask = (index[:, None] < count) & (channel < SHAPE.size)
    tl.store(here + channel, values.to(x.base.dtype.element_ty), mask=mask)


@triton.jit
def _seen_keys(begin, sizes, sight, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """First key, and the end of the keys, that a block of queries sees."""
    first, last = 0, sizes.num_keys
    offset = sizes.num_keys - sizes.num_queries
    if KIND.causal:
        last = tl.minimum(last, offset + begin + SHAPE.queries)
    if KIND.windowed:
        first = tl.maximum(first, offset + begin - sight.window + 1) // SHAPE.keys * SHAPE.keys
    return first, last


@triton.jit
def _forward(q, k, v, sinks, out, lse, sizes, sight, SINKS: tl.constexpr, KIND: tl.constexpr, SHAPE: tl.constexpr):
    begin = tl.program_id(0) * SHAPE.queries
    sample, head = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    index = begin + tl.arange(0, SHAPE.queries)
    query = (sizes.num_keys - sizes.num_queries + index)[:, None]
    queries = _rows(q, index, sample, head, sizes.num_queries, SHAPE)
    largest = tl.full((SHAPE.queries,), float("-inf"), tl.float32)
    exponentials = tl.full((SHAPE.queries,), 0.0, tl.float32)
    total = tl.full((SHAPE.queries, SHAPE.channels), 0.0, tl.float32)
    first, last = _seen_keys(begin, sizes, sight, SHAPE, KIND)
    for start in range(first, last, SHAPE.keys):
        key = start + tl.arange(0, SHAPE.keys)
        some_keys = _rows(k, key, sample, head // sizes.group, sizes.num_keys, SHAPE)
        x = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
        x = logits_of(x, sight, sample, head, query, key[None, :], sizes.num_keys, KIND)
        grown = tl.maximum(largest, tl.max(x, axis=1))
        # A query that has seen nothing yet: -inf - 0 is -inf, whereas -inf - -inf would be NaN.
        base = tl.where(grown == float("-inf"), 0.0, grown)
        p = tl.exp(x - base[:, None])
        shrunk = tl.exp(largest - base)
        exponentials = exponentials * shrunk + tl.sum(p, axis=1)
        p = kept(p, sight, sample, head, query, key[None, :]).to(v.base.dtype.element_ty)
        values = _rows(v, key, sample, head // sizes.group, sizes.num_keys, SHAPE)
        total = total * shrunk[:, None] + tl.dot(p, values, input_precision="ieee")
        largest = grown
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        grown = tl.maximum(largest, sink)
        exponentials = exponentials * tl.exp(largest - grown) + tl.exp(sink - grown)
        total = total * tl.exp(largest - grown)[:, None]
        largest = grown
    # A query that sees nothing: an output of 0, and a log-sum-exp of -inf.
    total = total * (sight.factor / tl.where(exponentials == 0.0, 1.0, exponentials))[:, None]
    _store(out, total, index, sample, head, sizes.num_queries, SHAPE)
    row = tl.program_id(1).to(tl.int64) * sizes.num_queries + index
    tl.store(lse + row, largest + tl.log(exponentials), mask=index < sizes.num_queries)


@triton.jit
def _means(dout, out, means, sizes, SHAPE: tl.constexpr):
    index = tl.program_id(0) * SHAPE.queries + tl.arange(0, SHAPE.queries)
    sample, head = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    product = _rows(dout, index, sample, head, sizes.num_queries, SHAPE).to(tl.float32)
    product *= _rows(out, index, sample, head, sizes.num_queries, SHAPE).to(tl.float32)
    row = tl.program_id(1).to(tl.int64) * sizes.num_queries + index
    tl.store(means + row, tl.sum(product, axis=1), mask=index < sizes.num_queries)


@triton.jit
def _gradients_of_scores(products, grads, lse, means, index, key, sample, head, sizes, sight, KIND: tl.constexpr):
    """Dropped probabilities, and gradients of the products of queries and keys, both [q, k].

    `grads` are those of the dropped probabilities.
    """
    query = (sizes.num_keys - sizes.num_queries + index)[:, None]
    row = (sample * sizes.heads + head).to(tl.int64) * sizes.num_queries + index
    # Beyond the last query +inf: its probabilities are 0.
    total = tl.load(lse + row, mask=index < sizes.num_queries, other=float("inf"))[:, None]
    mean = tl.load(means + row, mask=index < sizes.num_queries, other=0.0)[:, None]
    x = logits_of(products, sight, sample, head, query, key[None, :], sizes.num_keys, KIND)
    p = tl.exp(x - tl.where(total == float("-inf"), 0.0, total))
    dropped = kept(p, sight, sample, head, query, key[None, :]) * sight.factor
    grads = kept(grads, sight, sample, head, query, key[None, :]) * sight.factor
    return dropped, p * (grads - mean) * sight.scale


@triton.jit
def _gradients_of_keys(q, k, v, dout, lse, means, dk, dv, sizes, sight, KIND: tl.constexpr, SHAPE: tl.constexpr):
    begin = tl.program_id(0) * SHAPE.keys
    kv_heads, offset = sizes.heads // sizes.group, sizes.num_keys - sizes.num_queries
    sample, kv = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    key = begin + tl.arange(0, SHAPE.keys)
    some_keys = _rows(k, key, sample, kv, sizes.num_keys, SHAPE)
    values = _rows(v, key, sample, kv, sizes.num_keys, SHAPE)
    first, last = 0, sizes.num_queries
    if KIND.causal:
        first = tl.maximum(first, begin - offset) // SHAPE.queries * SHAPE.queries
    if KIND.windowed:
        last = tl.minimum(last, begin + SHAPE.keys + sight.window - 1 - offset)
    of_keys = tl.full((SHAPE.keys, SHAPE.channels), 0.0, tl.float32)
    of_values = tl.full((SHAPE.keys, SHAPE.channels), 0.0, tl.float32)
    for head in range(kv * sizes.group, (kv + 1) * sizes.group):
        for start in range(first, last, SHAPE.queries):
            index = start + tl.arange(0, SHAPE.queries)
            queries = _rows(q, index, sample, head, sizes.num_queries, SHAPE)
            grads = _rows(dout, index, sample, head, sizes.num_queries, SHAPE)
            x = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
            dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
            dropped, ds = _gradients_of_scores(x, dp, lse, means, index, key, sample, head, sizes, sight, KIND)
            of_values += tl.dot(tl.trans(dropped.to(grads.dtype)), grads, input_precision="ieee")
            of_keys += tl.dot(tl.trans(ds.to(queries.dtype)), queries, input_precision="ieee")
    _store(dk, of_keys, key, sample, kv, sizes.num_keys, SHAPE)
    _store(dv, of_values, key, sample, kv, sizes.num_keys, SHAPE)


@triton.jit
def _gradients_of_queries(q, k, v, dout, lse, means, dq, sizes, sight, KIND: tl.constexpr, SHAPE: tl.constexpr):
    begin = tl.program_id(0) * SHAPE.queries
    sample, head = tl.program_id(1) // sizes.heads, tl.program_id(1) % sizes.heads
    index = begin + tl.arange(0, SHAPE.queries)
    queries = _rows(q, index, sample, head, sizes.num_queries, SHAPE)
    grads = _rows(dout, index, sample, head, sizes.num_queries, SHAPE)
    of_queries = tl.full((SHAPE.queries, SHAPE.channels), 0.0, tl.float32)
    first, last = _seen_keys(begin, sizes, sight, SHAPE, KIND)
    for start in range(first, last, SHAPE.keys):
        key = start + tl.arange(0, SHAPE.keys)
        some_keys = _rows(k, key, sample, head // sizes.group, sizes.num_keys, SHAPE)
        values = _rows(v, key, sample, head // sizes.group, sizes.num_keys, SHAPE)
        x = tl.dot(queries, tl.trans(some_keys), input_precision="ieee")
        dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
        _, ds = _gradients_of_scores(x, dp, lse, means, index, key, sample, head, sizes, sight, KIND)
        of_queries += tl.dot(ds.to(some_keys.dtype), some_keys, input_precision="ieee")
    _store(dq, of_queries, index, sample, head, sizes.num_queries, SHAPE)


def _heads(x: Tensor) -> Heads:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Heads(x, *x.stride()[:3])


def _sizes(q: Tensor, k: Tensor) -> Sizes:
    num_queries, batch, heads, _ = q.shape
    return Sizes(batch, heads, heads // k.shape[2], num_queries, k.shape[0])


def _shape(size: int, blocks: BlockSizes) -> Shape:
    return Shape(size, channels_of(size), blocks.queries, blocks.keys)


def channels_of(size: int) -> int:
    """The power of two, of at least what a product of matrices takes, that holds the channels of a head."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size))


def _options(blocks: BlockSizes) -> dict[str, Any]:
    return {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}


def _is_taken(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.shape[-1] <= LARGEST_HEAD and v.shape == k.shape and q.shape[1] * q.shape[2] <= MOST_PROGRAMS


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    """Output [q, B, n, H] and log-sum-exp fp32 [B, n, q]; see attention/dropout_attention.py."""
    if not _is_taken(q, k, v):
        return NotImplemented
    num_queries, batch, heads, size = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=q.device)
    sight, kind = sight_of(given, size**-0.5, lse)
    blocks = forward_blocks(channels_of(size), q.element_size())
    _forward[(triton.cdiv(num_queries, blocks.queries), batch * heads)](
        *(_heads(q), _heads(k), _heads(v), lse if sinks is None else sinks, _heads(out), lse, _sizes(q, k), sight),
        SINKS=sinks is not None,
        KIND=kind,
        SHAPE=_shape(size, blocks),
        **_options(blocks),
    )
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks."""
    if not _is_taken(q, k, v):
        return NotImplemented
    num_queries, batch, heads, size = q.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    means, lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device), lse.contiguous()
    sight, kind = sight_of(given, size**-0.5, lse)
    blocks = backward_blocks(channels_of(size), q.element_size())
    fixed: dict[str, Any] = {"SHAPE": _shape(size, blocks), **_options(blocks)}
    sizes, of_queries, of_output = _sizes(q, k), (triton.cdiv(num_queries, blocks.queries), batch * heads), _heads(dout)
    _means[of_queries](of_output, _heads(out), means, sizes, **fixed)
    read = (*map(_heads, (q, k, v)), of_output, lse, means)
    of_keys = (triton.cdiv(k.shape[0], blocks.keys), batch * k.shape[2])
    _gradients_of_keys[of_keys](*read, _heads(dk), _heads(dv), sizes, sight, KIND=kind, **fixed)
    _gradients_of_queries[of_queries](*read, _heads(dq), sizes, sight, KIND=kind, **fixed)
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return dq, dk, dv, -(probability * means).sum((0, 2)).to(sinks.dtype)
