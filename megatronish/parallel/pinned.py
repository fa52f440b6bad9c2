"""Pinned memory: memory of the CPU that a GPU copies from and to while the host continues, many tensors in few blocks.

torch rounds each block that it pins up to a power of two: alone, buckets of 160 MB would take 256 MB each. So tensors
that are made together share blocks that are nearly such a power. Of a block less than one of its tensors is not used,
and each of a few blocks is half as large as the one before; of a single tensor nothing can be saved.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes


class Form(NamedTuple):
    """Shape and dtype of a tensor that is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def pinned_zeros(forms: Sequence[Form]) -> list[Tensor]:
    """A tensor of zeros in pinned memory for each form."""
    tensors: list[Tensor] = []
    for sizes in blocks_of([each.num_bytes for each in forms]):
        block, begin = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.uint8, pin_memory=True), 0
        for form in forms[len(tensors) : len(tensors) + len(sizes)]:
            tensors.append(block[begin : begin + form.num_bytes].view(form.dtype).view(form.shape))
            begin += _aligned(form.num_bytes)
    return tensors


def blocks_of(sizes: Sequence[int]) -> list[list[int]]:
    """Sizes in bytes, in their order, of the tensors that share each block; where it takes less, each has its own."""
    return min(list(_shared(sizes)), [[size] for size in sizes], key=bytes_of_blocks)


def bytes_of_blocks(blocks: Sequence[Sequence[int]]) -> int:
    """What torch pins for blocks of tensors of these sizes."""
    return sum(power_above(sum(map(_aligned, block))) for block in blocks)


def _shared(sizes: Sequence[int]) -> Iterator[list[int]]:
    left = list(sizes)
    while left:
        total = max(1, sum(map(_aligned, left)))
        capacity = power_above(total)
        if capacity - total > max(map(_aligned, left)):
            capacity = max(capacity // 2, power_above(_aligned(left[0])))
        block, taken = list[int](), 0
        while left and taken + _aligned(left[0]) <= capacity:
            taken += _aligned(left[0])
            block.append(left.pop(0))
        yield block


def power_above(size: int) -> int:
    """The smallest power of two that is not smaller: what torch pins for so many bytes."""
    return 1 << (size - 1).bit_length() if size else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
