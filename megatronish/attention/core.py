"""What does each token take from the tokens it sees? Attention over a whole sequence, on one rank's heads."""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megatronish.attention.operations import accumulation_dtype
from megatronish.attention.visibility import Visibility


class ProbabilityDropout(Protocol):
    """[B, n, q, k] -> [B, n, q, k]: each probability dropped, or kept and scaled up, by its global place alone.

    Called again with the same places it drops the same ones; so it also turns the gradient of its output into that of
    its input. The n heads start from `first_head`; `queries` [q] and `keys` [k] are positions along the sequence.
    """

    def __call__(self, probabilities: Tensor, *, first_head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """See the class."""
        ...


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visibility: Visibility,
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
) -> Tensor:
    """[S, B, n, H], [S, B, k, H], [S, B, k, H] -> [S, B, n H] of the whole sequence, in its order."""
    drop: Callable[[Tensor], Tensor] | None = None
    if dropout is not None:
        positions = torch.arange(q.shape[0], device=q.device)
        drop = partial(dropout, first_head=first_head, queries=positions, keys=positions)
    return attention(q, k, v, visible=visibility.whole, dropout=drop)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[S, B, n, H], [S, B, k, H], [S, B, k, H] -> [S, B, n H]; n / k query heads share a key/value head.

    `visible` None means plain causal; a single query is the last one, and sees all keys. SDPA (flash attention) does
    the work; with dropout the probabilities are made explicit, because SDPA draws its masks from the global generator.
    """
    seq_length, _, heads, head_size = q.shape
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    grouped = k.shape[1] != heads
    if dropout is None:
        is_causal = visible is None and seq_length > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=is_causal, enable_gqa=grouped)
    else:
        if grouped:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        if visible is None:
            positions = torch.arange(seq_length, device=q.device)
            visible = Visibility(seq_length).mask(positions, positions)
        scores = (q @ k.transpose(-2, -1)).to(accumulation_dtype(q.dtype)) * (1.0 / math.sqrt(head_size))
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = dropout(probabilities).to(v.dtype) @ v
    return rearrange(out, "b n s h -> s b (n h)")
