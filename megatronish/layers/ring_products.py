"""Products of a cut sequence in pieces: each is multiplied while the next one is on its way (--tp-comm-overlap).

Under sequence parallelism a column-parallel product waits for an all-gather, and a row-parallel one is followed by a
reduce-scatter that all wait for. What both exchange are tp pieces of a sequence, and each can be multiplied by itself:
the pieces go round the ranks as a ring, one hop while one piece is multiplied. Exposed is only what a hop takes longer
than the product of a piece; it was the whole exchange.

Both move the bytes of the collectives that they replace. The terms of a sum are added in the order of the ring, another
one for each piece: the same numbers, rounded elsewhere. Three exchanges of a layer's four are these; the backward of a
column-parallel product hides its own behind the gradient of the weight (linear.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.layers.product import DENSE, Product
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm, symmetric
from megatronish.parallel.mesh import Axis, TensorParallel


def gathered_product(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """[s, B, in], this rank's piece; [out, in], [out] -> [S, B, out]: the product of all pieces, S = size s.

    No rank holds the whole of what is multiplied: a piece is sent on and forgotten.
    """
    axis = tp.axis
    if tp.shares_memory:
        _, y = symmetric.gathered_product(x, weight.t(), axis)
        return y if bias is None else y.add_(bias)
    y = x.new_empty(axis.size * x.shape[0], *x.shape[1:-1], weight.shape[0])
    rows, piece = y.chunk(axis.size), x
    for step in range(axis.size):
        sending = comm.start_shift(piece, axis) if step + 1 < axis.size else None
        _multiply(piece, weight.t(), bias, into=rows[_owner(axis, step)])
        if sending is not None:
            piece = sending.wait()
    return y


def scattered_product(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """[S, B, in], one term of a sum over the axis; [out, in] -> [s, B, out]: this rank's piece of the sum.

    The sum of a piece begins on the rank after the one that it is for, and takes each rank's term as it passes.
    """
    axis = tp.axis
    if tp.shares_memory:
        return symmetric.scattered_product(x, weight.t(), axis)
    pieces = x.chunk(axis.size)
    total = F.linear(pieces[_owner(axis, 1)], weight)
    for step in range(2, axis.size + 1):
        sending = comm.start_shift(total, axis)
        term = F.linear(pieces[_owner(axis, step)], weight)
        total = term.add_(sending.wait())
    return total


class ScatteredProduct(Product):
    """Row-parallel product of one forward over the ranks of tp: [S, B, in/tp] -> [s, B, out], summed and cut.

    Its gradients get this rank's piece of dy. That of the input brings the others along, which that of the weight uses.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self._tp, self._axis = tp, tp.axis
        self._dy: Tensor | None = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[S, B, in/tp], [out, in/tp] -> [s, B, out]. A bias would be added once by each rank: the layer adds it."""
        assert bias is None
        return scattered_product(x, weight, self._tp)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[s, B, out], [out, in/tp] -> [S, B, in/tp]: each piece of dy is multiplied while the next one arrives."""
        axis = self._axis
        if self._tp.shares_memory:
            self._dy, dx = symmetric.gathered_product(dy, weight, axis, keeps=True)
            return dx
        self._dy = dy.new_empty(axis.size * dy.shape[0], *dy.shape[1:])
        dx = dy.new_empty(*self._dy.shape[:-1], weight.shape[1])
        pieces, rows = self._dy.chunk(axis.size), dx.chunk(axis.size)
        pieces[axis.rank].copy_(dy)
        for step in range(axis.size):
            piece, sending = _owner(axis, step), None
            if step + 1 < axis.size:
                sending = comm.start_shift(pieces[piece], axis, into=pieces[_owner(axis, step + 1)])
            _multiply(pieces[piece], weight, None, into=rows[piece])
            if sending is not None:
                sending.wait()
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """[s, B, out], [S, B, in/tp] -> [out, in/tp], of the whole dy."""
        return DENSE.weight_gradient(self._whole, x)

    def add_weight_gradient(self, to: GradientSum, dy: Tensor, x: Tensor) -> None:
        """Add the gradient of the weight, of the whole dy, to the sum in place."""
        DENSE.add_weight_gradient(to, self._whole, x)

    @property
    def _whole(self) -> Tensor:
        assert self._dy is not None, "the gradient of the input comes first"
        return self._dy


def _owner(axis: Axis, step: int) -> int:
    """Rank whose piece is here after so many hops."""
    return (axis.rank - step) % axis.size


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, *, into: Tensor) -> None:
    """[s, B, in] times [in, out] into [s, B, out]."""
    x, into = x.flatten(0, -2), into.view(-1, into.shape[-1])
    if bias is None:
        torch.mm(x, matrix, out=into)
    else:
        torch.addmm(bias, x, matrix, out=into)
