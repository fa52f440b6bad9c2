"""Capacity of experts: at most C = ceil(factor K S / E) tokens of each *sequence* go to an expert, the first ones.

A limit per rank or per micro-batch, as other frameworks have it, is another model in every layout. This limit is a
property of the sequence: a choice is kept if fewer than C earlier choices of its sequence fell on the same expert.
Ranks that hold parts of a sequence exchange their counts, [blocks, B, E] integers, and count on from the blocks before
theirs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


class Capacity(NamedTuple):
    """Limit of each expert in a sequence, and the axes that cut sequences: tp (tokens of its own a rank) inside cp."""

    limit: int
    cp: Axis
    tp: Axis

    @classmethod
    def of(cls, factor: float, *, num_chosen: int, num_experts: int, seq_length: int, cp: Axis, tp: Axis) -> "Capacity":
        """Capacity of a sequence of `seq_length` tokens."""
        return cls(math.ceil(factor * num_chosen * seq_length / num_experts), cp, tp)


def kept_choices(choices: Tensor, positions: Tensor, capacity: Capacity, *, num_experts: int) -> Tensor:
    """[s, B, K] choices of this rank's tokens at `positions` [s] -> bool [s, B, K], whether each is kept.

    Positions rise within each of the rank's blocks: two under context parallelism (zigzag.py), unless an even tp cuts
    between them.
    """
    length, num_sequences, _ = choices.shape
    num_blocks = 2 if capacity.cp.size > 1 and capacity.tp.size % 2 else 1
    # 1. Earlier choices in the token's own block: a token chooses an expert once at most.
    chosen = torch.zeros(length, num_sequences, num_experts, dtype=torch.int32, device=choices.device)
    chosen.scatter_(2, choices, 1)
    blocks = chosen.unflatten(0, (num_blocks, -1))  # [blocks, s / blocks, B, E]
    counts = blocks.sum(1, dtype=torch.int32)  # [blocks, B, E]
    earlier = (blocks.cumsum(1, dtype=torch.int32) - blocks).flatten(0, 1)
    # 2. Choices in all blocks that begin before it, on whatever rank.
    starts = positions.unflatten(0, (num_blocks, -1))[:, 0].contiguous()  # [blocks]
    all_counts, all_starts = counts, starts
    for axis in (capacity.tp, capacity.cp):
        all_counts = comm.start_all_gather(all_counts, axis).wait()
        all_starts = comm.start_all_gather(all_starts, axis).wait()
    before = (all_starts < starts[:, None]).to(torch.int32)  # [blocks, all blocks]
    offset = torch.einsum("ma,abe->mbe", before.long(), all_counts.long())  # [blocks, B, E]
    place = earlier.gather(2, choices) + offset.repeat_interleave(length // num_blocks, 0).gather(2, choices)
    return place < capacity.limit
