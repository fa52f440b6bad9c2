"""Weights of linear layers in NF4: their stored form, and the products that dequantise it, forward and again backward.

The weight of a layer is uint8, [..., out, in / 64 * 33]: of each block of 64 neighbours 32 bytes of codes and the 8-bit
code of its absmax, or without double quantisation 36, with an fp32 absmax. So tensor parallelism, ZeRO and the experts'
axes cut it as they cut the weight itself, at whole blocks. The scales of the second level are few (4 bytes for 16,384
elements) and count blocks of the global tensor: a parameter of their own, which tp leaves whole. They are bytes as
well, so nothing rounds them to the precision of the run.

Each section (q, k, v; gate, up) is quantised as a tensor of its own, with a mean of its own, and so is each expert.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.layers.product import Product
from megatronish.ops.grouped_mm import Groups
from megatronish.ops.nf4 import (
    BLOCK,
    BLOCKS_PER_SCALE,
    CHUNK,
    dequantise,
    dequantise_scales,
    quantise,
    quantise_scales,
)
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import ZEROS, Cut, Sharding

CODES = BLOCK // 2  # bytes of a block


@dataclass(frozen=True)
class NF4Form:
    """Stored form of a matrix [sum of `sections`, in_features]; with `double` quantisation, or with absmax in fp32."""

    sections: tuple[int, ...]
    in_features: int
    double: bool = True

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.in_features // BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: codes and absmax."""
        return CODES + (1 if self.double else 4)

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


class MatrixPiece(NamedTuple):
    """Rows of one section: their place in a rank's part, that of the section's scales, and their number in it."""

    rows: slice
    scales: slice
    first_row: int


class NF4Weight(nn.Module):
    """What a layer needs to read its stored weight: the form, the part that this rank holds, and the scales.

    `dense` is the sharding of the weight itself; `rows` and `columns` are the axes that cut each of its matrices.
    """

    scales: nn.Parameter | None

    def __init__(self, form: NF4Form, dense: Sharding, *, rows: Axis, columns: Axis, num_local: int | None) -> None:
        super().__init__()
        self.form, self.dense, self.rows, self.columns = form, dense, rows, columns
        self.num_experts = None if num_local is None else dense.shape[0]
        shape = (form.scale_bytes,) if num_local is None else (num_local, form.scale_bytes)
        scales = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False) if form.double else None
        self.register_parameter("scales", scales)

    def shardings(self) -> dict[str, Sharding]:
        """The scales are whole on every rank of tp, and those of experts where the experts are."""
        if self.scales is None:
            return {}
        if self.num_experts is None:
            return {"scales": Sharding((self.form.scale_bytes,))}
        shape = (self.num_experts, self.form.scale_bytes)
        return {"scales": Sharding(shape, (Cut(0, "ep"),), domain=self.dense.domain, role="vector")}

    def stored(self, weight: Sharding) -> Sharding:
        """The weight's last dim in bytes instead of elements."""
        return replace(weight, shape=self.stored_shape(weight.shape), init=ZEROS)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[..., in] -> [..., in / 64 * block_bytes]."""
        return (*shape[:-1], shape[-1] // BLOCK * self.form.block_bytes)

    def matrix(self, stored: Tensor, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """[out, bytes], this rank's part of the weight, or of an expert's -> [out, in] in this dtype, a new tensor."""
        scales = None if self.scales is None else self.scales if expert is None else self.scales[expert]
        numbers = None if scales is None else scales.view(torch.float32)
        width = self.form.blocks // self.columns.size  # blocks of a row that this rank holds
        matrix = torch.empty(stored.shape[0], width * BLOCK, dtype=dtype, device=stored.device)
        for piece in self.pieces():
            blocks = stored[piece.rows].unflatten(-1, (width, -1))
            own = None if numbers is None else numbers[piece.scales]
            absmax = self._absmax(blocks[..., CODES:], own, first_row=piece.first_row)
            dequantise(blocks[..., :CODES], absmax, matrix[piece.rows])
        return matrix

    def pieces(self) -> Iterator[MatrixPiece]:
        """Rows of this rank's part that are dequantised together, one piece after the other: CHUNK elements or less."""
        step, begin, first = max(1, CHUNK // (self.form.in_features // self.columns.size)), 0, 0
        for size in self.form.sections:
            rows, level = size // self.rows.size, self.form.scales_of(size)
            for row in range(0, rows, step):
                place = slice(begin + row, begin + min(row + step, rows))
                yield MatrixPiece(place, slice(first, first + level), self.rows.rank * rows + row)
            begin, first = begin + rows, first + level

    def _absmax(self, codes: Tensor, level: Tensor | None, *, first_row: int) -> Tensor:
        """Bytes [n, width, 1 or 4] of rows from `first_row` of the section on -> fp32 [n, width].

        Which scale a block has follows from its number in the global section.
        """
        if level is None:
            return codes.contiguous().view(torch.float32).squeeze(-1)
        num_rows, width = codes.shape[:2]
        rows = torch.arange(first_row, first_row + num_rows, device=codes.device) * self.form.blocks
        columns = torch.arange(width, device=codes.device) + self.columns.rank * width
        numbers = (rows.unsqueeze(1) + columns) // BLOCKS_PER_SCALE
        return dequantise_scales(codes.squeeze(-1), level[numbers], level[-1])


class NF4Product(NF4Weight):
    """Product with a frozen weight in NF4: dequantised for each of its two uses, and not held between them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in], stored form, [out] -> [..., out]."""
        return F.linear(x, self.matrix(weight, x.dtype), bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., out], stored form -> [..., in]."""
        return dy @ self.matrix(weight, dy.dtype)

    def weight_gradient(self, _dy: Tensor, _x: Tensor) -> None:
        """None: the weight is frozen."""

    def add_weight_gradient(self, _total: Tensor, _dy: Tensor, _x: Tensor) -> None:
        """Leave the sum as it is: the weight is frozen."""


class NF4Experts(NF4Weight):
    """Products with the frozen weights of experts in NF4, each expert's quantised by itself."""

    def of(self, groups: Groups, _shape: torch.Size) -> Product:
        """Product of one forward."""
        return NF4GroupedProduct(self, groups)


class NF4GroupedProduct(Product):
    """Product of rows sorted by expert: one expert at a time is dequantised, and none without rows."""

    def __init__(self, weights: NF4Experts, groups: Groups) -> None:
        self.weights, self.groups = weights, groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], stored form [E, ..., out, bytes] -> [N, out]."""
        assert bias is None, "experts have no biases"
        y = x.new_empty(x.shape[0], math.prod(weight.shape[1:-1]))
        for e, rows in self.groups.slices():
            torch.mm(x[rows], self._matrix(weight, e, x.dtype).t(), out=y[rows])
        return y

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[N, out], stored form -> [N, in]."""
        width = self.weights.form.in_features // self.weights.columns.size
        dx = dy.new_empty(dy.shape[0], width)
        for e, rows in self.groups.slices():
            torch.mm(dy[rows], self._matrix(weight, e, dy.dtype), out=dx[rows])
        return dx

    def weight_gradient(self, _dy: Tensor, _x: Tensor) -> None:
        """None: the weights are frozen."""

    def _matrix(self, weight: Tensor, e: int, dtype: torch.dtype) -> Tensor:
        return self.weights.matrix(weight[e].flatten(0, -2), dtype, e)
