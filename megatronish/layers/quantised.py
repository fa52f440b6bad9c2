"""Linear layers whose frozen weight is stored in few bits: the products that dequantise it, forward and backward.

How it is stored is a `StoredForm` (layers/nf4.py, layers/int8.py): bytes of a row that tensor parallelism, ZeRO and the
experts' axes cut as they cut the weight itself, and a few scales, which count rows or blocks of the global tensor and
are whole on every rank of tp. Both are bytes, so nothing rounds them to the precision of the run.

Each section (q, k, v; gate, up) is quantised as a tensor of its own, and so is each expert.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.layers.product import Product
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import ZEROS, Cut, Sharding
from megatronish.specs.chunk_sizes import chunk_sizes


class StoredForm(Protocol):
    """How a matrix [sum of `sections`, in_features] is stored."""

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of each section."""

    @property
    def in_features(self) -> int:
        """Elements of a row."""

    @property
    def has_kernels(self) -> bool:
        """Whether a kernel dequantises it on a GPU."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all sections; 0 if there are none."""

    def row_bytes(self, in_features: int) -> int:
        """Bytes of so many elements of a row."""

    def scales_of(self, rows: int) -> int:
        """Scales (fp32) of a section of so many rows."""

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[out, in], the whole matrix -> uint8 [out, row_bytes], and scales, uint8 [scale_bytes]."""

    def unpack(self, stored: Tensor, scales: Tensor | None, into: Tensor, *, first_row: int, columns: Axis) -> None:
        """Rows of one section, from `first_row` on, of the columns of this rank -> [n, in], in the dtype of `into`.

        `stored` is uint8 [n, bytes], `scales` fp32, all of the section.
        """


class MatrixPiece(NamedTuple):
    """Rows of one section: their place in a rank's part, that of the section's scales, and their number in it."""

    rows: slice
    scales: slice
    first_row: int


class QuantisedWeight(nn.Module):
    """What a layer needs to read its stored weight: the form, the part that this rank holds, and the scales.

    `dense` is the sharding of the weight itself; `rows` and `columns` are the axes that cut each of its matrices.
    """

    scales: nn.Parameter | None

    def __init__(self, form: StoredForm, dense: Sharding, *, rows: Axis, columns: Axis, num_local: int | None) -> None:
        super().__init__()
        self.form, self.dense, self.rows, self.columns = form, dense, rows, columns
        self.num_experts = None if num_local is None else dense.shape[0]
        shape = (form.scale_bytes,) if num_local is None else (num_local, form.scale_bytes)
        scales = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False) if form.scale_bytes else None
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
        """[..., in] -> [..., bytes of a row]."""
        return (*shape[:-1], self.form.row_bytes(shape[-1]))

    def matrix(self, stored: Tensor, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """[out, bytes], this rank's part of the weight, or of an expert's -> [out, in] in this dtype, a new tensor."""
        scales = None if self.scales is None else self.scales if expert is None else self.scales[expert]
        numbers = None if scales is None else scales.view(torch.float32)
        width = self.form.in_features // self.columns.size
        matrix = torch.empty(stored.shape[0], width, dtype=dtype, device=stored.device)
        for piece in self.pieces(stored.device):
            own = None if numbers is None else numbers[piece.scales]
            rows = piece.rows
            self.form.unpack(stored[rows], own, matrix[rows], first_row=piece.first_row, columns=self.columns)
        return matrix

    def pieces(self, device: torch.device) -> Iterator[MatrixPiece]:
        """Rows of this rank's part that are dequantised together, one piece after the other.

        Where a kernel does it, a section is one piece: it needs no memory besides the result.
        """
        fused = device.type == "cuda" and self.form.has_kernels
        width = self.form.in_features // self.columns.size
        step = self.dense.shape[-2] if fused else max(1, chunk_sizes(device.type).quantised // width)
        begin = first = 0
        for size in self.form.sections:
            rows, level = size // self.rows.size, self.form.scales_of(size)
            for row in range(0, rows, step):
                place = slice(begin + row, begin + min(row + step, rows))
                yield MatrixPiece(place, slice(first, first + level), self.rows.rank * rows + row)
            begin, first = begin + rows, first + level


class QuantisedProduct(QuantisedWeight):
    """Product with a frozen weight in few bits: dequantised for each of its two uses, and not held between them."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in], stored form, [out] -> [..., out]."""
        return F.linear(x, self.matrix(weight, x.dtype), bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., out], stored form -> [..., in]."""
        return dy @ self.matrix(weight, dy.dtype)

    def weight_gradient(self, _dy: Tensor, _x: Tensor) -> None:
        """None: the weight is frozen."""


class QuantisedExperts(QuantisedWeight):
    """Products with the frozen weights of experts in few bits, each expert's quantised by itself."""

    def of(self, groups: Groups, _shape: torch.Size) -> Product:
        """Product of one forward."""
        return QuantisedGroupedProduct(self, groups)


class QuantisedGroupedProduct(Product):
    """Product of rows sorted by expert: one expert at a time is dequantised, and none without rows."""

    def __init__(self, weights: QuantisedExperts, groups: Groups) -> None:
        self.weights, self.groups = weights, groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], stored form [E, ..., out, bytes] -> [N, out]."""
        assert bias is None, "StackedLinear adds it"
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
