"""Operations that compute a tile of attention, with what each of them requires: flash, cuDNN, "efficient" and explicit.

They compute the same, with the shapes of tile.py, which chooses one. Torch's own draw masks that would depend on
the layout; so with dropout the probabilities of a tile are explicit. What those of CUDA require beyond their signatures
stands at each.
It was read from torch's sources (2.13) and has not run on a GPU yet: tests with the marker `gpu` in test_attention.py
are there for that.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.attention.explicit import stacked, unstacked
from megatronish.ops.dropout import DroppedTile
from megatronish.ops.library import accumulation_dtype

aten = torch.ops.aten

HEAD_ALIGNMENT = 8  # channels
LSE_ALIGNMENT = 32  # queries
BIAS_ALIGNMENT = 16  # keys


class TileMask(NamedTuple):
    """Mask of a tile: all keys, plain causal (as many queries as keys), `dense` with ALiBi, `bias`, or `dropped`."""

    causal: bool = False
    dense: Tensor | None = None  # bool [1 or B, 1, q, k]
    alibi: Tensor | None = None  # added to the scores, fp32 [1, n, q, k]; needs `dense`
    dropped: DroppedTile | None = None  # it says all that the others do
    bias: Tensor | None = None  # on a CPU: additive [q, k] in the dtype of q; every query sees a key


class TileGradients(NamedTuple):
    """Gradients of a tile's queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor


class Operation(NamedTuple):
    """Pair of functions that compute a tile forward and backward; `lse` is contiguous."""

    forward: Callable[[Tensor, Tensor, Tensor, TileMask], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, TileMask], TileGradients]


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _bias(q: Tensor, tile_mask: TileMask, *, alignment: int = 1) -> Tensor | None:
    """Additive mask: ALiBi, or 0, where the mask is True and -inf elsewhere.

    Rows begin at multiples of `alignment` in memory.
    """
    mask, alibi = tile_mask.dense, tile_mask.alibi
    if tile_mask.bias is not None:
        return tile_mask.bias.expand(q.shape[0], q.shape[1], -1, -1)
    if mask is None:
        return None
    samples, _, queries, keys = mask.shape
    heads = 1 if alibi is None else alibi.shape[1]
    bias = q.new_zeros(samples, heads, queries, keys + -keys % alignment)[..., :keys]
    if alibi is not None:
        bias.copy_(alibi)
    return bias.masked_fill_(~mask, -torch.inf).expand(q.shape[0], q.shape[1], -1, -1)


# On CPU: shares kv heads among query heads, takes any strides and a bias in the dtype of q.


def _flash_on_cpu_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, tile_mask.causal, attn_mask=_bias(q, tile_mask), scale=_scale(q)
    )


def _flash_on_cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> TileGradients:
    return TileGradients(
        *aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, tile_mask.causal, attn_mask=_bias(q, tile_mask), scale=_scale(q)
        )
    )


# On CUDA, flash: half precision, compute capability 8.0, no mask, heads of at most 256 channels in multiples of 8.
# Shares kv heads. The state of the generator is read for dropout alone; without sequences of several lengths the
# cumulative lengths are absent.


def _pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Heads padded with zero channels to the alignment: they change no score, and their outputs are cut off."""
    return [F.pad(x, (0, -x.shape[-1] % HEAD_ALIGNMENT)) if x.shape[-1] % HEAD_ALIGNMENT else x for x in tensors]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    padded = _pad_heads(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, 0.0, tile_mask.causal, scale=_scale(q))
    return out[..., : q.shape[-1]], lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> TileGradients:
    dout, q_padded, k, v, out = _pad_heads(dout, q, k, v, out)
    no_state = (q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))
    lengths = (None, None, q.shape[2], k.shape[2])
    grads = aten._scaled_dot_product_flash_attention_backward(
        dout, q_padded, k, v, out, lse, *lengths, 0.0, tile_mask.causal, *no_state, scale=_scale(q)
    )
    return TileGradients(*(grad[..., : q.shape[-1]] for grad in grads))


# On CUDA, cuDNN: as flash, with heads of at most 128 channels. Its log-sum-exp has a last dim of one. Without dropout
# seed and offset are not read; the bias is absent, and so are the cumulative lengths.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    padded = _pad_heads(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*padded, None, True, 0.0, tile_mask.causal, scale=_scale(q))
    return out[..., : q.shape[-1]], lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> TileGradients:
    dout, q_padded, k, v, out = _pad_heads(dout, q, k, v, out)
    no_state = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    lengths = (None, None, q.shape[2], k.shape[2])
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q_padded, k, v, out, lse.unsqueeze(-1), *no_state, None, *lengths, 0.0, tile_mask.causal, scale=_scale(q)
    )
    return TileGradients(*(grad[..., : q.shape[-1]] for grad in grads))


# On CUDA, "efficient": any float but fp64, any mask, as many kv heads as query heads, heads in multiples of 8 channels.
# A bias has the whole shape, rows aligned. Its log-sum-exp is padded to multiples of 32 queries; its backward reads it
# so, with +inf where there is no query, and takes the output to be dense in the order [B, q, n, H], without a check.


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    padded, bias = _pad_heads(q, k, v), _bias(q, tile_mask, alignment=BIAS_ALIGNMENT)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *padded, bias, True, 0.0, tile_mask.causal, scale=_scale(q)
    )
    return out[..., : q.shape[-1]], lse[..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> TileGradients:
    kv_heads, bias = k.shape[1], _bias(q, tile_mask, alignment=BIAS_ALIGNMENT)
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (k, v))
    dout, q_padded, k, v, out = _pad_heads(dout, q, k, v, out)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
    no_state = (q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64))
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q_padded, k, v, bias, out, lse, *no_state, 0.0, wanted, tile_mask.causal, scale=_scale(q)
    )
    dk, dv = (grad.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32) for grad in (dk, dv))
    return TileGradients(*(grad[..., : q.shape[-1]] for grad in (dq, dk, dv)))


# Anywhere, with the probabilities made explicit and dropped, in fp32: half precision would round gradients of
# probabilities before their mean is taken off, which is most of them.


def product(a: Tensor, b: Tensor) -> Tensor:
    """[B, k, i, j], [B, k, j, l] -> [B, k, i, l], summed and returned in at least fp32."""
    dtype = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype == b.dtype != dtype:  # tensor cores add in fp32 and need not round the sum
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype).unflatten(0, a.shape[:2])
    return a.to(dtype) @ b.to(dtype)


def _explicit_forward(q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    assert tile_mask.dropped is not None
    heads, kv_heads = q.shape[1], k.shape[1]
    scores = product(stacked(q, kv_heads), k.mT)
    lse = tile_mask.dropped.softmax_(unstacked(scores, heads), scale=_scale(q))
    return unstacked(product(scores.to(v.dtype), v), heads), lse


def _explicit_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
) -> TileGradients:
    """Backward of attention from q, k, v, the output and the log-sum-exp, with dropout drawn again.

    The backward of softmax subtracts from each row of gradients its mean, weighted by probability. That mean is the sum
    of dout * out over the head's channels (Dao et al. 2022, arXiv:2205.14135, section 3.1).
    """
    assert tile_mask.dropped is not None
    heads, kv_heads = q.shape[1], k.shape[1]
    means = (dout.to(lse.dtype) * out).sum(-1)
    q, dout = stacked(q, kv_heads), stacked(dout.to(q.dtype), kv_heads)
    scores, grads = product(q, k.mT), product(dout, v.mT)
    # In place: scores become the dropped probabilities, their gradients those of the products of queries and keys.
    tile_mask.dropped.softmax_backward_(
        unstacked(scores, heads), unstacked(grads, heads), lse, means, scale=1.0 / math.sqrt(k.shape[-1])
    )
    scores, grads = scores.to(v.dtype), grads.to(q.dtype)
    return TileGradients(unstacked(product(grads, k), heads), product(grads.mT, q), product(scores.mT, dout))


FLASH_ON_CPU = Operation(_flash_on_cpu_forward, _flash_on_cpu_backward)
FLASH = Operation(_flash_forward, _flash_backward)
CUDNN = Operation(_cudnn_forward, _cudnn_backward)
EFFICIENT = Operation(_efficient_forward, _efficient_backward)
EXPLICIT = Operation(_explicit_forward, _explicit_backward)
