"""Stored form of weights in NF4: of each block of 64 neighbours of a row 32 bytes of codes and its absmax.

Absmax is the 8-bit code of it, 33 bytes a block in all, or without double quantisation fp32, 36 bytes. So every cut at
whole blocks is a cut of the bytes. The scales of the second level are few (4 bytes for 16,384 elements) and count
blocks of the global tensor; each section has a mean of its own after them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.ops.nf4 import (
    BLOCK,
    BLOCKS_PER_SCALE,
    HAS_KERNELS,
    quantise,
    quantise_scales,
    unpack,
)
from megatronish.parallel.mesh import Axis

CODES = BLOCK // 2  # bytes of a block


@dataclass(frozen=True)
class NF4Form:
    """Stored form of a matrix [sum of `sections`, in_features]; with `double` quantisation, or with absmax in fp32."""

    sections: tuple[int, ...]
    in_features: int
    double: bool = True

    @property
    def has_kernels(self) -> bool:
        """Whether codes and both levels of scales are read by one kernel."""
        return HAS_KERNELS

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.in_features // BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: codes and absmax."""
        return CODES + (1 if self.double else 4)

    def row_bytes(self, in_features: int) -> int:
        """Bytes of so many elements of a row, whole blocks."""
        return in_features // BLOCK * self.block_bytes

    def scales_of(self, rows: int) -> int:
        """Numbers of the second level of a section: its scales, and at last the mean."""
        return -(-rows * self.blocks // BLOCKS_PER_SCALE) + 1 if self.double else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the second level of all sections."""
        return 4 * sum(map(self.scales_of, self.sections))

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[out, in], the whole matrix -> stored form, uint8 [out, in / 64 * block_bytes], and scales, uint8 [bytes]."""
        stored = torch.empty(*weight.shape[:1], self.blocks, self.block_bytes, dtype=torch.uint8, device=weight.device)
        levels, begin = [], 0
        for rows in self.sections:
            place = stored[begin : begin + rows]
            codes, absmax = quantise(weight[begin : begin + rows])
            place[..., :CODES] = codes
            if self.double:
                inner = quantise_scales(absmax.flatten())
                place[..., CODES] = inner.codes.view(rows, -1)
                levels += [inner.scales, inner.offset.view(1)]
            else:
                place[..., CODES:] = absmax.unsqueeze(-1).view(torch.uint8)
            begin += rows
        scales = torch.cat(levels) if levels else weight.new_empty(0, dtype=torch.float32)
        return stored.flatten(1), scales.view(torch.uint8)

    def unpack(self, stored: Tensor, scales: Tensor | None, into: Tensor, *, first_row: int, columns: Axis) -> None:
        """Rows of one section, from `first_row` on, of the columns of this rank -> [n, in], in the dtype of `into`."""
        first_block = columns.rank * (into.shape[1] // BLOCK)
        unpack(into, stored, scales, first_row=first_row, row_blocks=self.blocks, first_block=first_block)
