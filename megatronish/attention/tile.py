"""Attention of one tile, a run of queries against a run of keys: forward and backward, as ring attention needs them.

`forward` returns the tile's own output, as if there were no other keys, and the log-sum-exp of its scores, by which
tiles are merged. `backward` is given the output and the log-sum-exp over *all* keys, and returns the tile's terms of
the gradients. SDPA offers only both together, so the operations that it is made of are called by name (operations.py),
each where the table of choice.py has it.

Shapes: q, out [B, n, q, H]; k, v [B, kv, k, H]; lse [B, n, q], at least fp32; n / kv query heads share a kv head.
"""

import torch
from torch import Tensor

from megatronish.attention.choice import operation_for
from megatronish.attention.operations import TileGradients, TileMask


def forward(q: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the tile. A row that sees nothing has a finite output and a log-sum-exp of -inf."""
    if tile_mask.dense is None:
        return operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    seen = tile_mask.dense.any(-1)
    # Operations differ in what they return for a row that sees no key (on CPU a log-sum-exp of 0). Such rows are shown
    # all keys, and their log-sum-exp is set to -inf afterwards: the merge then gives them no weight.
    tile_mask = tile_mask._replace(dense=tile_mask.dense | ~seen.unsqueeze(-1))
    out, lse = operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    return out, lse.masked_fill(~seen, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask
) -> TileGradients:
    """The tile's terms of the gradients. `out` and `lse` are those over all keys of the sequence.

    `lse` is finite, for every token sees itself. So a row that sees nothing here has gradients of exactly zero.
    """
    return operation_for(q, tile_mask).backward(dout, q, k, v, out, lse.contiguous(), tile_mask)


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a tile's output [B, n, q, H] and log-sum-exp [B, n, q] into those of the tiles before, in place.

    The merged output is the mean of both, weighted by their sums of exponentials: exp(new) / (exp(lse) + exp(new)) is
    sigmoid(new - lse).
    """
    # Sums of exponentials would overflow; the weight by a sigmoid of a difference cannot. Against lse = -inf it is 1.
    out.lerp_(new_out.to(out.dtype), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))
