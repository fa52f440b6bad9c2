"""What does each token take from the tokens it sees? The core of attention, on one rank's heads."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def visibility(
    seq_length: int, *, window_size: int | None, document_ids: Tensor | None, device: torch.device
) -> Tensor:
    """[1 or B, 1, S, S] bool: True where a query (row) sees a key (column).

    A token sees itself and what came before it, at most `window_size` tokens in all, within its own document.
    """
    positions = torch.arange(seq_length, device=device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if window_size is not None:
        visible &= distance < window_size
    visible = visible[None, None]
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[S, B, n, H], [S, B, k, H], [S, B, k, H] -> [S, B, n H]; n / k query heads share a key/value head.

    `visible` None means plain causal. SDPA (flash attention) does the work; with dropout the probabilities are made
    explicit, because SDPA draws its masks from the global generator.
    """
    seq_length, _, heads, head_size = q.shape
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    grouped = k.shape[1] != heads
    if dropout is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=grouped)
    else:
        if grouped:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        if visible is None:
            visible = visibility(seq_length, window_size=None, document_ids=None, device=q.device)
        scores = (q @ k.transpose(-2, -1)).float() * (1.0 / math.sqrt(head_size))
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = dropout(probabilities).to(v.dtype) @ v
    return rearrange(out, "b n s h -> s b (n h)")
