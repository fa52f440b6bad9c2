"""Dropout by hashes of places: the hash itself for all kernels here, and the operators of ops/dropout.py.

The hash is that of parallel/streams.py in int32, which wraps around on every device: masks are equal bit for bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatronish.parallel.streams import drop_threshold

COLUMNS = 1024  # of a program of `dropout_add`
KEYS = 1024  # of a tile's row, at once


@triton.jit
def mix(bits):
    """Scrambled int32, as by `_mix` of streams.py."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * (0x846CA68B - 4294967296)
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def hash_of_elements(rows, columns):
    """Hashes of rows (the last key mixed in) and global columns, both int32, which broadcast."""
    return mix(rows + columns * (0x9E3779B9 - 4294967296))


@triton.jit
def hash_of_queries(keys, sample, head, queries):
    """Hashes of rows of probabilities: int32 of a sample, a head and positions of queries."""
    rows = mix(mix(tl.load(keys) ^ sample) ^ head)
    return mix(mix(rows ^ queries) ^ tl.load(keys + 1))


@triton.jit
def _add(
    x,
    residual,
    out,
    keys,
    samples,
    positions,
    batch,
    columns,
    threshold,
    factor,
    ADDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    sample = tl.load(samples + row % batch).to(tl.int32)
    position = tl.load(positions + row // batch).to(tl.int32)
    hashed = mix(mix(mix(tl.load(keys) ^ sample) ^ position) ^ tl.load(keys + 1))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    place = row.to(tl.int64) * columns + column
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * factor
    # Rounded before it is added, as in torch.
    value = tl.where(hash_of_elements(hashed, column) >= threshold, value, 0.0).to(out.dtype.element_ty)
    if ADDS:
        value = value.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


class Sight(NamedTuple):
    """What a probability's mask and visibility depend on. `length` is that of a row of `documents`."""

    keys: Any
    samples: Any
    documents: Any
    slopes: Any
    length: Any
    first_head: Any
    window: Any
    threshold: Any
    factor: Any
    scale: Any


class Kind(NamedTuple):
    """What is known of it when a kernel is compiled."""

    causal: bool
    windowed: bool
    documents: bool
    alibi: bool


def sight_of(place: tuple[Any, ...], scale: float, unused: Tensor) -> tuple[Sight, Kind]:
    """`place` are keys, samples, documents, slopes, the first head, window size, causality and rate; `unused` any."""
    keys, samples, documents, slopes, first_head, window, causal, rate = place
    sight = Sight(
        keys.contiguous(),
        samples.contiguous(),
        unused if documents is None else documents.contiguous(),
        unused if slopes is None else slopes.contiguous(),
        length=0 if documents is None else documents.shape[1],
        first_head=first_head,
        window=window or 0,
        threshold=drop_threshold(rate),
        factor=1.0 / (1.0 - rate),
        scale=scale,
    )
    return sight, Kind(causal, causal and window is not None, documents is not None, slopes is not None)


@triton.jit
def logits_of(products, sight, sample, head, query, key, num_keys, KIND: tl.constexpr):
    """Scaled scores of positions [q, 1] and [1, k], with ALiBi; -inf where nothing is seen or there is no key."""
    scores, distance = products * sight.scale, query - key
    is_seen = key < num_keys
    if KIND.causal:
        is_seen = is_seen & (distance >= 0)
    if KIND.windowed:
        is_seen = is_seen & (distance < sight.window)
    if KIND.documents:
        own = sight.documents + sample.to(tl.int64) * sight.length
        of_query = tl.load(own + query, mask=query < sight.length, other=-2)
        is_seen = is_seen & (tl.load(own + key, mask=key < num_keys, other=-1) == of_query)
    if KIND.alibi:
        scores = scores - tl.load(sight.slopes + head) * distance.to(tl.float32)
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def kept(x, sight, sample, head, query, key):
    """Values of positions [q, 1] and [1, k], those that dropout leaves, not scaled up; 0 in the place of others."""
    number = tl.load(sight.samples + sample).to(tl.int32)
    rows = hash_of_queries(sight.keys, number, sight.first_head + head, query)
    return tl.where(hash_of_elements(rows, key) >= sight.threshold, x, 0.0)


class ScoreTile(NamedTuple):
    """Scores [B, n, q, k] and what is of each row of them, and where the tile is."""

    scores: Any
    grads: Any
    lse: Any
    means: Any
    heads: Any
    num_queries: Any
    num_keys: Any
    first_query: Any
    first_key: Any


@triton.jit
def _row_logits(tile, sight, row, start, KIND: tl.constexpr, KEYS: tl.constexpr):
    column = start + tl.arange(0, KEYS)
    x = tl.load(tile.scores + row.to(tl.int64) * tile.num_keys + column, mask=column < tile.num_keys, other=0.0)
    sample, head = row // tile.num_queries // tile.heads, row // tile.num_queries % tile.heads
    query, key = tile.first_query + row % tile.num_queries, tile.first_key + column
    return logits_of(x, sight, sample, head, query, key, tile.first_key + tile.num_keys, KIND)


@triton.jit
def _softmax(tile, sight, BACKWARD: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr):
    row = tl.program_id(0)
    sample, head = row // tile.num_queries // tile.heads, row // tile.num_queries % tile.heads
    query, place = tile.first_query + row % tile.num_queries, row.to(tl.int64) * tile.num_keys
    if BACKWARD:
        base = tl.load(tile.lse + row)
    else:
        largest = tl.full((), float("-inf"), tl.float32)
        exponentials = tl.full((), 0.0, tl.float32)
        for start in range(0, tile.num_keys, KEYS):
            x = _row_logits(tile, sight, row, start, KIND, KEYS)
            grown = tl.maximum(largest, tl.max(x, axis=0))
            base = tl.where(grown == float("-inf"), 0.0, grown)
            exponentials = exponentials * tl.exp(largest - base) + tl.sum(tl.exp(x - base), axis=0)
            largest = grown
        lse = largest + tl.log(exponentials)
        tl.store(tile.lse + row, lse)
        base = tl.where(lse == float("-inf"), 0.0, lse)
    for start in range(0, tile.num_keys, KEYS):
        column = start + tl.arange(0, KEYS)
        mask = column < tile.num_keys
        p = tl.exp(_row_logits(tile, sight, row, start, KIND, KEYS) - base)
        dropped = kept(p, sight, sample, head, query, tile.first_key + column) * sight.factor
        tl.store(tile.scores + place + column, dropped, mask=mask)
        if BACKWARD:
            g = tl.load(tile.grads + place + column, mask=mask, other=0.0)
            g = kept(g, sight, sample, head, query, tile.first_key + column) * sight.factor
            g = p * (g - tl.load(tile.means + row)) * sight.scale
            tl.store(tile.grads + place + column, g, mask=mask)


def dropout_add(
    x: Tensor, residual: Tensor | None, keys: Tensor, samples: Tensor, positions: Tensor, rate: float
) -> Tensor:
    """Dropout of hidden states with the residual addition; see ops/dropout.py."""
    x, keys, samples, positions = (each.contiguous() for each in (x, keys, samples, positions))
    columns = x.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        _add[(x.numel() // columns, triton.cdiv(columns, COLUMNS))](
            *(x, x if residual is None else residual.contiguous(), out, keys, samples, positions),
            *(samples.numel(), columns, drop_threshold(rate), 1.0 / (1.0 - rate)),
            ADDS=residual is not None,
            COLUMNS=COLUMNS,
            enable_fp_fusion=False,  # a product is rounded before it is added: the bits of the reference
        )
    return out


def softmax(scores: Tensor, lse: Tensor, *place: Any) -> None:
    """See `softmax_dropout` of ops/dropout.py."""
    return _tile(scores, scores, lse, lse, place, is_backward=False)


def softmax_backward(scores: Tensor, grads: Tensor, lse: Tensor, means: Tensor, *place: Any) -> None:
    """See `softmax_dropout_backward` of ops/dropout.py."""
    return _tile(scores, grads, lse, means.contiguous(), place, is_backward=True)


def _tile(scores: Tensor, grads: Tensor, lse: Tensor, means: Tensor, place: Any, *, is_backward: bool) -> None:
    if any(each.dtype != torch.float32 for each in (scores, grads, lse, means)):
        return NotImplemented
    assert scores.is_contiguous() and grads.is_contiguous() and lse.is_contiguous(), "tiles are contiguous"
    *names, first_head, first_query, first_key, window, causal, scale, rate = place
    sight, kind = sight_of((*names, first_head, window, causal, rate), scale, lse)
    _, heads, num_queries, num_keys = scores.shape
    tile = ScoreTile(scores, grads, lse, means, heads, num_queries, num_keys, first_query, first_key)
    if scores.numel():
        _softmax[(lse.numel(),)](tile, sight, BACKWARD=is_backward, KIND=kind, KEYS=KEYS, enable_fp_fusion=True)
    return None
