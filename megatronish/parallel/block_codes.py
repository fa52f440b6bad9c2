"""Numbers as codes: blocks of 128 neighbours x are sent as round(x / scale), where scale = max |x| / q goes along.

q is 127 for int8 and 7 for int4, of which two codes share a byte. An element that is read back is off by at most half a
scale: max |x| / (2 q) of its block. So a tensor that is small everywhere must not share a block with a large one.
"""

from typing import Literal

import torch
from torch import Tensor

from megatronish.parallel.bucketing import BYTES_OF_BLOCK, CODE_BLOCK

CodeType = Literal["int8", "int4"]
LARGEST_CODE: dict[str, int] = {"int8": 127, "int4": 7}
_SCALE_BYTES = 4
_AT_ONCE = 1 << 20  # elements: temporary memory stays small against what is sent


def encode(blocks: Tensor, dtype: str, into: Tensor) -> None:
    """fp32 [n, CODE_BLOCK] -> uint8 [n, bytes of a block], written there."""
    rows = _AT_ONCE // CODE_BLOCK
    for first in range(0, len(blocks), rows):
        part, sent = blocks[first : first + rows], into[first : first + rows]
        scale = part.abs().amax(1, keepdim=True) / LARGEST_CODE[dtype]
        codes = (part / torch.where(scale > 0, scale, 1.0)).round_()
        if dtype == "int4":
            codes = (codes + 8).to(torch.uint8)
            sent[:, :-_SCALE_BYTES] = codes[:, ::2] | (codes[:, 1::2] << 4)
        else:
            sent[:, :-_SCALE_BYTES] = codes.to(torch.int8).view(torch.uint8)
        sent[:, -_SCALE_BYTES:] = scale.view(torch.uint8)


def encoded(blocks: Tensor, dtype: str) -> Tensor:
    """fp32 [n, CODE_BLOCK] -> uint8 [n, bytes of a block], a new tensor."""
    sent = torch.empty(len(blocks), BYTES_OF_BLOCK[dtype], dtype=torch.uint8, device=blocks.device)
    encode(blocks, dtype, sent)
    return sent


def decoded(sent: Tensor, dtype: str) -> Tensor:
    """uint8 [n, bytes of a block] -> fp32 [n, CODE_BLOCK], a new tensor."""
    blocks = torch.zeros(len(sent), CODE_BLOCK, device=sent.device)
    add_decoded(sent, dtype, blocks)
    return blocks


def add_decoded(sent: Tensor, dtype: str, into: Tensor) -> None:
    """uint8 [n, bytes of a block], added to fp32 [n, CODE_BLOCK]."""
    rows = _AT_ONCE // CODE_BLOCK
    for first in range(0, len(sent), rows):
        part = sent[first : first + rows]
        codes, scale = part[:, :-_SCALE_BYTES], part[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        if dtype == "int4":
            values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).float() - 8
        else:
            values = codes.view(torch.int8).float()
        into[first : first + rows] += values * scale
