"""Blocks of a ring of latents: what multi-head latent attention sends in the place of the keys and values of all heads.

A block is [c | k_r] of the tokens of one rank of cp: the normalised latent, and the turned key that all heads share,
r + dr numbers a token (DeepSeek-V2, arXiv:2405.04434). Each rank of the ring makes of it the keys and values of its own
heads, [k_n | v] = W c, and in the backward the gradient of the block and a term of the gradient of W.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LatentSizes(NamedTuple):
    """Numbers of a latent, and of the parts of a head: of the key without and with RoPE, and of the value."""

    latent: int
    plain: int
    rotary: int
    value: int

    @property
    def head(self) -> int:
        """Numbers of a key."""
        return self.plain + self.rotary


def open_block(block: Tensor, up: Tensor, sizes: LatentSizes) -> Tensor:
    """[S, B, r + dr], W [n (dn + dv), r] -> keys and values [2, B, n, S, dn + dr]; values end in zeros."""
    latent, shared = block.split((sizes.latent, sizes.rotary), dim=-1)
    plain, values = (
        F.linear(latent, up).unflatten(-1, (-1, sizes.plain + sizes.value)).split((sizes.plain, sizes.value), dim=-1)
    )
    opened = block.new_zeros(2, block.shape[1], plain.shape[2], block.shape[0], sizes.head)
    keys, wide_values = opened.permute(0, 3, 1, 2, 4)  # as views [S, B, n, H]
    keys[..., : sizes.plain] = plain
    keys[..., sizes.plain :] = shared.unsqueeze(2)
    wide_values[..., : sizes.value] = values
    return opened


def gradients_of_block(opened: Tensor, block: Tensor, up: Tensor, sizes: LatentSizes) -> tuple[Tensor, Tensor]:
    """Gradient of what `open_block` returned -> this rank's terms of the gradients of block and W, in its dtype.

    Products are in the dtype of W, as those of any linear layer.
    """
    keys, values = opened.permute(0, 3, 1, 2, 4)  # [S, B, n, H]
    dup = torch.cat((keys[..., : sizes.plain], values[..., : sizes.value]), dim=-1).flatten(2).to(up.dtype)
    dlatent = (dup @ up).to(opened.dtype)
    dshared = keys[..., sizes.plain :].sum(2)
    dweight = dup.flatten(0, 1).t() @ block[..., : sizes.latent].flatten(0, 1)
    return torch.cat((dlatent, dshared), dim=-1), dweight.to(opened.dtype)
