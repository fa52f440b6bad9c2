"""Attention with explicit probabilities: scores, softmax, dropout, and the product with the values.

It takes memory quadratic in the sequence, which flash attention does not. Dropout needs it, for SDPA draws masks of its
own. The query heads that share a key/value head are stacked along the queries, so that keys and values are not copied
for each of them.

The fused softmax (ops/softmax.py) reads the scores once and keeps nothing but its output, in the dtype of the model:
with dropout 5 bytes a score in half precision, as in Korthikanti et al. 2022. The unfused one is a chain of operations
of torch, whose probabilities are in fp32 until they meet the values. It alone knows ALiBi, sinks, and a change of each
score before the softmax (`score_mod`, as FlexAttention names it): a soft cap.
"""

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from megatronish.attention.mask import AttentionMask
from megatronish.ops.library import accumulation_dtype
from megatronish.ops.softmax import scaled_causal_softmax, scaled_masked_softmax


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    fused: bool,
    dropout: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, n, q, H], [B, kv, k, H], [B, kv, k, H], sinks [n] -> [B, n, q, H]; the last query stands at the last key."""
    heads, kv_heads, scale = q.shape[1], k.shape[1], 1.0 / math.sqrt(q.shape[-1])
    scores = unstacked(stacked(q, kv_heads) @ k.mT, heads)
    if fused and not mask.slopes and sinks is None and score_mod is None:
        probabilities = _fused_softmax(scores, mask, scale)
    else:
        probabilities = _softmax(scores, mask, scale, sinks, score_mod)
    if dropout is not None:
        probabilities = dropout(probabilities)
    return unstacked(stacked(probabilities.to(v.dtype), kv_heads) @ v, heads)


def stacked(x: Tensor, kv_heads: int) -> Tensor:
    """[B, n, q, *] -> [B, kv, n / kv q, *]: the query heads of each key/value head, one after the other."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unstacked(x: Tensor, heads: int) -> Tensor:
    """[B, kv, n / kv q, *] -> [B, n, q, *]: the inverse of `stacked`."""
    return x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


def _fused_softmax(scores: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    if mask.causal and mask.document_ids is None and (mask.pattern is None or mask.whole is None):
        return scaled_causal_softmax(scores, scale=scale, window_size=mask.window_size)
    return scaled_masked_softmax(scores, mask.whole, scale=scale)


def _softmax(
    scores: Tensor,
    mask: AttentionMask,
    scale: float,
    sinks: Tensor | None,
    score_mod: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    scaled = scores.to(accumulation_dtype(scores.dtype)) * scale
    if score_mod is not None:
        scaled = score_mod(scaled)
    if mask.slopes:
        scaled = scaled + mask.whole_bias(scaled.dtype)
    else:
        dense = mask.whole
        if dense is None and mask.causal:
            queries, keys = scores.shape[-2:]
            positions = torch.arange(keys, device=scores.device)
            dense = mask.dense(positions[keys - queries :], positions)
        if dense is not None:
            scaled = scaled.masked_fill(~dense, -torch.inf)
    if sinks is None:
        return scaled.softmax(-1)
    column = sinks.to(scaled.dtype)[:, None, None].expand(*scaled.shape[:-1], 1)
    return torch.cat((scaled, column), dim=-1).softmax(-1)[..., :-1]


# Attention with a learned bias of each score, with its probabilities in memory (T5, Raffel et al. 2020).
#
# The bias has a gradient, which neither flash attention's operators nor ring attention hand on; so the
# probabilities are explicit. Scores are not scaled: T5 has the scale in its initial weights.


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    seen: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[q, B, n, H], [k, B, kv, H], [k, B, kv, H], bias [n, q, k] -> [q, B, n H].

    `seen` is bool [1 or B, 1, 1 or q, k], True where a query sees a key; None: all see all. `drop` is dropout of the
    probabilities [B, n, q, k].
    """
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    scores = unstacked(stacked(q, kv_heads) @ k.mT, heads)
    scores = scores.to(accumulation_dtype(scores.dtype))
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    probabilities = scores.softmax(-1)
    if drop is not None:
        probabilities = drop(probabilities)
    out = unstacked(stacked(probabilities.to(v.dtype), kv_heads) @ v, heads)
    return rearrange(out, "b n s h -> s b (n h)")
