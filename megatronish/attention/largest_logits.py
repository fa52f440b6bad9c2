"""Largest logits of attention: of each head, over all queries and keys of a step that a mask shows.

A logit is what the softmax is taken of, before a soft cap and the biases of ALiBi: the scaled product of a query and a
key, which is what the weights of both decide. No kernel of attention returns the largest one, so it is a pass of its
own, without gradient: a product of queries and keys more, block by block, whose scores are kept nowhere. Over cp the
keys of the whole sequence are gathered for it.

A maximum is free of order, and counting twice does not change it: neither the layout nor recomputation shows in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.attention.explicit import stacked, unstacked
from megatronish.attention.mask import AttentionMask
from megatronish.attention.operations import product
from megatronish.attention.zigzag import chunks_of, from_zigzag
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

BLOCK = 128
"""Queries of a block."""


@dataclass(frozen=True)
class LargestLogits:
    """Largest logits of a model's heads that this rank has seen since `forget`: fp32 [layers, heads], at first -inf."""

    of_heads: Tensor

    @classmethod
    def none_yet(cls, num_layers: int, num_heads: int, *, device: torch.device) -> "LargestLogits":
        """Those of a rank that has seen nothing."""
        return cls(torch.full((num_layers, num_heads), -torch.inf, device=device))

    def forget(self) -> None:
        """Begin again, in the same memory: a CUDA graph writes there."""
        self.of_heads.fill_(-torch.inf)

    @torch.no_grad()
    def see(self, q: Tensor, k: Tensor, *, layer: int, first_head: int, mask: AttentionMask, cp: Axis) -> None:
        """Queries [S/cp, B, n, H] and keys [S/cp, B, kv, H] of a layer's heads from `first_head` on."""
        heads, length = q.shape[2], mask.seq_length
        runs = [range(length)] if cp.size == 1 else list(chunks_of(length, cp.rank, cp.size))
        if cp.size > 1:
            k = from_zigzag(comm.start_all_gather(k.contiguous(), cp, layer=layer).wait(), cp.size)
        q, k = (x.permute(1, 2, 0, 3) for x in (q, k))
        largest, begin = self.of_heads[layer, first_head : first_head + heads], 0
        for run in runs:
            for block in (run[at : at + BLOCK] for at in range(0, len(run), BLOCK)):
                of_block = q[:, :, begin : begin + len(block)]
                begin += len(block)
                torch.maximum(largest, _largest(of_block, k, queries=block, mask=mask), out=largest)


def _largest(q: Tensor, k: Tensor, *, queries: range, mask: AttentionMask) -> Tensor:
    """[B, n, q, H] at these places, all keys [B, kv, S, H] -> the largest logit of each head, fp32 [n]."""
    last = queries.stop if mask.causal else mask.seq_length
    first = 0 if mask.window_size is None else max(0, queries.start - mask.window_size + 1)
    keys, kv_heads = range(first, last), k.shape[1]
    scores = unstacked(product(stacked(q, kv_heads), k[:, :, first:last].mT), q.shape[1])
    if mask.between(queries, keys) != "everything":
        rows, columns = (torch.arange(some.start, some.stop, device=q.device) for some in (queries, keys))
        scores = scores.masked_fill(~mask.dense(rows, columns), -torch.inf)
    return scores.amax((0, 2, 3)).float() / math.sqrt(q.shape[-1])
