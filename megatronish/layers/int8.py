"""Stored form of weights in 8 bits, with one scale for each row: LLM.int8 of Dettmers et al. 2022 (arXiv:2208.07339).

An element is round(127 w / absmax), where absmax is the largest magnitude of its row of the global tensor. Only weights
are quantised: activations stay in the precision of the run, so no feature of theirs needs the paper's second product
for outliers. A cut of the weight is a cut of its codes, of any number of elements. Codes and scales have the bits of
bitsandbytes' `int8_vectorwise_quant`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatronish.parallel.mesh import Axis

LARGEST = 127
"""The largest code."""


@dataclass(frozen=True)
class Int8Form:
    """Stored form of a matrix [sum of `sections`, in_features]: a byte an element, and fp32 scales of its rows."""

    sections: tuple[int, ...]
    in_features: int

    @property
    def has_kernels(self) -> bool:
        """None: a product with a scale is a single operator of torch."""
        return False

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all sections."""
        return 4 * sum(self.sections)

    def row_bytes(self, in_features: int) -> int:
        """Bytes of so many elements of a row."""
        return in_features

    def scales_of(self, rows: int) -> int:
        """Scales of a section: one for each row."""
        return rows

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[out, in], the whole matrix -> codes, uint8 [out, in], and absmax of the rows, uint8 [4 out]."""
        absmax = weight.abs().amax(-1).float()
        codes = torch.round(weight * (LARGEST / absmax.clamp_min(1e-38)).unsqueeze(-1)).to(torch.int8)
        return codes.view(torch.uint8), absmax.view(torch.uint8)

    def unpack(self, stored: Tensor, scales: Tensor | None, into: Tensor, *, first_row: int, columns: Axis) -> None:
        """Rows of one section, from `first_row` on -> [n, in], in the dtype of `into`; alike in all columns."""
        assert scales is not None
        own = scales[first_row : first_row + len(stored)].unsqueeze(-1)
        into.copy_(stored.view(torch.int8) * own * (1 / LARGEST))
