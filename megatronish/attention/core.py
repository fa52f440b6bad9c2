"""Attention over a whole sequence, on one rank's heads: without probabilities in memory, or with (explicit.py).

Without, it is SDPA or FlexAttention (flash.py). SDPA knows no sinks; with them its flash operations run (sinks.py). It
draws masks of its own from the global generator; so dropout has an attention of its own,
block by block (dropout_attention.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from megatronish.attention.dropout_attention import dropped_attention
from megatronish.attention.explicit import explicit_attention
from megatronish.attention.flash import flash_attention
from megatronish.attention.mask import AttentionMask
from megatronish.attention.sinks import sink_attention
from megatronish.config.sections.training import AttentionBackend
from megatronish.ops.dropout import ProbabilityDropout


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    backend: AttentionBackend = "auto",
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[q, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [q, B, n H]: queries are the whole sequence, or the end of it.

    n / kv query heads share a key/value head; `sinks` [n] are logits besides those of the keys. `auto` is SDPA
    (flash attention where the device has it) or FlexAttention, `flash` SDPA; with dropout both are attention block by
    block.
    """
    explicit = backend in ("fused_softmax", "unfused")
    if dropout is not None and not explicit:
        return dropped_attention(q, k, v, mask=mask, first_head=first_head, dropout=dropout, sinks=sinks)
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    if explicit:
        drop: Callable[[Tensor], Tensor] | None = None
        if dropout is not None:
            positions = torch.arange(mask.seq_length, device=q.device)
            queries = positions[mask.first_query :]
            drop = partial(dropout.drop, first_head=first_head, queries=queries, keys=positions)
        out = explicit_attention(q, k, v, mask=mask, fused=backend != "unfused", dropout=drop, sinks=sinks)
    elif sinks is not None:
        out = sink_attention(q, k, v, sinks, mask=mask)
    else:
        out = flash_attention(q, k, v, mask=mask, may_compile=backend == "auto")
    return rearrange(out, "b n s h -> s b (n h)")
