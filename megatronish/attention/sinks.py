"""Attention sinks: one more logit of each head in the denominator of the softmax, with a value of zero.

A query can then look at nothing: its probabilities sum up to less than 1. The logit is zero (off-by-one) or learned, as
gpt-oss has it. Attention with a sink follows from attention without one and the log-sum-exp of its scores:

    out' = out x sigmoid(lse - sink)        lse' = log(exp(lse) + exp(sink))

So flash attention can have sinks, and a ring absorbs them after its last tile. The backward of a tile reads `out` and
`lse` over all that the softmax sums up, so given out' and lse' it returns the gradients with the sink. The gradient of
the sink itself is that of a key whose value is zero: minus its probability times the sum of dout x out'.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish.attention import tile
from megatronish.attention.mask import AttentionMask
from megatronish.attention.operations import TileMask
from megatronish.ops.library import accumulation_dtype


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, mask: AttentionMask) -> Tensor:
    """[B, n, q, H], [B, kv, S, H], [B, kv, S, H], sinks [n] -> [B, n, q, H]; queries are the end of the sequence."""
    return _SinkAttention.apply(q, k, v, sinks, _one_tile(mask, q))


def absorb(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add sinks [n] to an output [B, n, q, H] and a log-sum-exp [B, n, q] in at least fp32, in place."""
    logits = sinks.to(lse.dtype)[:, None]
    out.mul_(torch.sigmoid(lse - logits).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, logits))


def kept(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], out: Tensor, lse: Tensor, *, result: Tensor
) -> Tensor:
    """End of a forward of q, k, v and sinks: `result`, a view of `out`, with the sinks and in the queries' precision.

    The rounded result is saved for the backward, which the output projection saves too, and not what it was rounded
    from.
    """
    *_, sinks = inputs
    if sinks is not None:
        absorb(out, lse, sinks)
    rounded = result.to(inputs[0].dtype)
    ctx.save_for_backward(*inputs, rounded, lse)
    return rounded


def gradient_of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[n]; the output and its gradient are [B, n, q, H], and the log-sum-exp [B, n, q] has the sinks in it."""
    probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    means = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(probability * means).sum((0, 2)).to(sinks.dtype)


def _one_tile(mask: AttentionMask, q: Tensor) -> TileMask:
    """Mask of the whole sequence as that of one tile. A single query of plain attention is the last: it sees all."""
    if mask.whole is None:
        return TileMask(causal=mask.causal and q.shape[2] > 1)
    return TileMask(dense=mask.whole, alibi=mask.whole_alibi)


class _SinkAttention(torch.autograd.Function):
    """One tile, forward and backward, with the sinks absorbed between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, tile_mask: TileMask) -> Tensor:
        out, lse = tile.forward(q, k, v, tile_mask=tile_mask)
        out, lse = out.to(accumulation_dtype(out.dtype), copy=True), lse.clone()
        ctx.tile_mask = tile_mask
        return kept(ctx, (q, k, v, sinks), out, lse, result=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradients = tile.backward(grads[0], q, out, lse, k, v, tile_mask=ctx.tile_mask)
        dsinks = gradient_of_sinks(grads[0], out, lse, sinks) if ctx.needs_input_grad[3] else None
        return gradients.q.to(q.dtype), gradients.k.to(k.dtype), gradients.v.to(v.dtype), dsinks, None
