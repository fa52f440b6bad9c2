"""Attention with a learned bias of each score, with its probabilities in memory (T5, Raffel et al. 2020).

The bias has a gradient, which neither flash attention's operators nor ring attention hand on; so the probabilities are
explicit. Scores are not scaled: T5 has the scale in its initial weights.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from megatronish.attention.explicit import stacked, unstacked
from megatronish.ops.library import accumulation_dtype


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
