"""What does a run of queries take from a run of keys, and how do both learn from it?

`forward` gives a tile's own output, as if there were no other keys, and the log-sum-exp of its scores, by which tiles
are merged. `backward` is given the output and the log-sum-exp over *all* keys, and returns the tile's terms of the
gradients. SDPA offers both halves joined only, so the operations it is made of are called by name (operations.py).

Shapes: q, out [B, n, q, H]; k, v [B, kv, k, H]; lse [B, n, q], at least fp32; n / kv query heads share a kv head.
"""

import torch
from torch import Tensor

from megatronish.attention.operations import (
    EFFICIENT,
    EXPLICIT,
    FLASH,
    FLASH_ON_CPU,
    Operation,
    TileGradients,
    TileMask,
)

FLASH_LARGEST_HEAD = 256
FLASH_OLDEST_GPU = (8, 0)


def forward(q: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    """out, lse. The output of a row that sees nothing is finite, and its log-sum-exp -inf."""
    if tile_mask.dense is None:
        return operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    seen = tile_mask.dense.any(-1)
    # What an operation makes of a row without keys is its own (on CPU a log-sum-exp of 0): show it all of them.
    tile_mask = tile_mask._replace(dense=tile_mask.dense | ~seen.unsqueeze(-1))
    out, lse = operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    return out, lse.masked_fill(~seen, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask
) -> TileGradients:
    """`lse` is finite, for every token sees itself; so a row that sees nothing here has gradients of exactly zero."""
    return operation_for(q, tile_mask).backward(dout, q, k, v, out, lse.contiguous(), tile_mask)


def operation_for(q: Tensor, tile_mask: TileMask) -> Operation:
    """What computes a tile: flash attention where it can, on CUDA the slower "efficient" one where it cannot."""
    if tile_mask.drop is not None:
        return EXPLICIT
    if q.device.type == "cpu":
        return FLASH_ON_CPU
    halved = q.dtype in (torch.float16, torch.bfloat16)
    new_enough = halved and torch.cuda.get_device_capability(q.device) >= FLASH_OLDEST_GPU
    return FLASH if new_enough and tile_mask.dense is None and q.shape[-1] <= FLASH_LARGEST_HEAD else EFFICIENT
