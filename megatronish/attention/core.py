"""Attention over a whole sequence, on one rank's heads: without probabilities in memory, or with (explicit.py).

Without, it is SDPA or FlexAttention (flash.py). SDPA knows no sinks; with them its flash operations run (sinks.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from megatronish.attention.explicit import explicit_attention
from megatronish.attention.flash import flash_attention
from megatronish.attention.mask import AttentionMask
from megatronish.attention.sinks import sink_attention
from megatronish.config.training import AttentionBackend


class ProbabilityDropout(Protocol):
    """Dropout on probabilities [B, n, q, k]: each is dropped, or kept and scaled up, by its global place alone.

    Called again with the same places it drops the same ones; so it also turns the gradient of its output into that of
    its input. The n heads start from `first_head`; `queries` [q] and `keys` [k] are positions along the sequence.
    """

    def __call__(self, probabilities: Tensor, *, first_head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """[B, n, q, k] -> [B, n, q, k]."""
        ...


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
    (flash attention where the device has it) or FlexAttention, and with dropout the fused softmax on explicit
    probabilities, because SDPA draws its masks from the global generator.
    """
    assert backend != "flash" or dropout is None, "flash attention drops nothing that a layout could draw again"
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    if backend in ("fused_softmax", "unfused") or dropout is not None:
        drop: Callable[[Tensor], Tensor] | None = None
        if dropout is not None:
            positions = torch.arange(mask.seq_length, device=q.device)
            queries = positions[mask.first_query :]
            drop = partial(dropout, first_head=first_head, queries=queries, keys=positions)
        out = explicit_attention(q, k, v, mask=mask, fused=backend != "unfused", dropout=drop, sinks=sinks)
    elif sinks is not None:
        out = sink_attention(q, k, v, sinks, mask=mask)
    else:
        out = flash_attention(q, k, v, mask=mask, may_compile=backend == "auto")
    return rearrange(out, "b n s h -> s b (n h)")
