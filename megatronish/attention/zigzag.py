"""Zigzag sharding of the sequence over cp: a rank holds a chunk from the front and its mirror image from the back.

The sequence is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r, in this order. Under a causal mask chunk c
sees c whole chunks and half of itself, so every rank has the same work: 2 cp - 1 whole chunks and two halves.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.parallel.mesh import Axis


class Chunks(NamedTuple):
    """Positions that a rank holds: a run at the front, a run at the back."""

    front: range
    back: range


def chunks_of(seq_length: int, cp_rank: int, cp_size: int) -> Chunks:
    """The positions of a cp rank as two runs of the same length."""
    assert seq_length % (2 * cp_size) == 0, f"{seq_length} is not cut into {2 * cp_size} equal chunks"
    length = seq_length // (2 * cp_size)
    front, back = (range(chunk * length, (chunk + 1) * length) for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank))
    return Chunks(front, back)


def places_of(seq_length: int, cp_rank: int, cp_size: int, *, device: torch.device | None = None) -> Tensor:
    """int64 [S/cp]: the positions along the whole sequence that a cp rank holds. All, in order, where cp is 1."""
    if cp_size == 1:
        return torch.arange(seq_length, device=device)
    chunks = chunks_of(seq_length, cp_rank, cp_size)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def places_on(
    lengths: Sequence[int], cp: Axis, *, starts: Sequence[int] | None = None, device: torch.device | None = None
) -> Tensor:
    """int64 [S/cp]: of sequences of these lengths in all, the places that a cp rank holds.

    `starts` are those of the sequences, by default one after the other.
    """
    starts = list(accumulate(lengths, initial=0)) if starts is None else starts
    parts = [
        start + places_of(length, cp.rank, cp.size, device=device)
        for start, length in zip(starts, lengths, strict=False)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def from_zigzag(x: Tensor, cp_size: int) -> Tensor:
    """[S, ...] -> [S, ...]: from the order of ranks, one after the other, to the order of the sequence."""
    front, back = x.unflatten(0, (cp_size, 2, -1)).unbind(1)
    return torch.cat((front, back.flip(0))).flatten(0, 1)


def to_zigzag(x: Tensor, cp_size: int) -> Tensor:
    """[S, ...] -> [S, ...]: the inverse of `from_zigzag`."""
    front, back = x.unflatten(0, (2 * cp_size, -1)).chunk(2)
    return torch.stack((front, back.flip(0)), dim=1).flatten(0, 2)
