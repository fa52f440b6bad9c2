"""Numbers as codes: blocks of neighbours x are sent as round(x / scale), where scale = max |x| / q goes along.

q is 127 for int8 and 7 for int4, of which two codes share a byte. An element that is read back is off by at most half a
scale: max |x| / (2 q) of its block. So a tensor that is small everywhere must not share a block with a large one.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from megatronish.parallel.bucketing import bytes_of_block

CodeType = Literal["int8", "int4"]
LARGEST_CODE: dict[str, int] = {"int8": 127, "int4": 7}
_SCALE_BYTES = 4
_AT_ONCE = 1 << 20  # elements: temporary memory stays small against what is sent


def encode(blocks: Tensor, dtype: str, into: Tensor) -> None:
    """fp32 [n, block] -> uint8 [n, bytes of a block], written there."""
    rows = _AT_ONCE // blocks.shape[1]
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
    """fp32 [n, block] -> uint8 [n, bytes of a block], a new tensor."""
    sent = torch.empty(len(blocks), bytes_of_block(dtype, blocks.shape[1]), dtype=torch.uint8, device=blocks.device)
    encode(blocks, dtype, sent)
    return sent


def decoded(sent: Tensor, dtype: str) -> Tensor:
    """uint8 [n, bytes of a block] -> fp32 [n, block], a new tensor."""
    blocks = torch.empty(len(sent), _size_of_block(sent, dtype), device=sent.device)
    decode(sent, dtype, blocks)
    return blocks


def decode(sent: Tensor, dtype: str, into: Tensor) -> None:
    """uint8 [n, bytes of a block] -> [n, block], written there, rounded once if `into` is not in fp32."""
    for rows, values in _values(sent, dtype):
        into[rows] = values


def add_decoded(sent: Tensor, dtype: str, into: Tensor) -> None:
    """uint8 [n, bytes of a block], added to fp32 [n, block]."""
    for rows, values in _values(sent, dtype):
        into[rows] += values


def _size_of_block(sent: Tensor, dtype: str) -> int:
    return (sent.shape[1] - _SCALE_BYTES) * (2 if dtype == "int4" else 1)


def _values(sent: Tensor, dtype: str) -> Iterator[tuple[slice, Tensor]]:
    """Rows of some blocks, and what they are in fp32 [n, block]."""
    rows = _AT_ONCE // _size_of_block(sent, dtype)
    for first in range(0, len(sent), rows):
        part = sent[first : first + rows]
        codes, scale = part[:, :-_SCALE_BYTES], part[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        if dtype == "int4":
            values = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).float() - 8
        else:
            values = codes.view(torch.int8).float()
        yield slice(first, first + rows), values.mul_(scale)
