"""Matrix distribution: whole matrices for an optimizer, when every rank has but pieces of them.

tp cuts a weight by rows or by columns, ZeRO keeps any run of its elements, `fully_shard` some of its rows; a piece
knows where it lies in the global tensor, and that is all that is needed:

    collect   each rank lays its pieces into a buffer of zeros that has a row for every rank, in which lie the matrices
              dealt to it; a reduce-scatter over the ranks that share parameters and one over tp add the rows up, and
              each rank is left with its own: whole matrices, exact, as every element is one value plus zeros
    compute   each rank those that it was dealt, and nobody else the same
    spread    all-gathers bring every row back, from which each rank takes what its pieces ask for

Ranks that hold copies are dealt different matrices, too, and get bit by bit the same. With R ranks (tp, sharing and
copying ranks of a stage) and M elements of matrices a rank sends about 2 M (R - 1) / R elements, and computes 1 / R of
the whole. Matrices go in rounds, the largest first, so that those dealt at once are of nearly one size; the buffer of
a round has MOST_AT_ONCE elements, or R times the largest matrix where that is more.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh import Domain
from megatronish.optim.masters import Masters
from megatronish.sharding import FlatPiece, Piece, Sharding

MOST_AT_ONCE = 2**25


class Matrix(NamedTuple):
    """Rows and columns of a parameter that are one matrix: all of it, or one of the sections it was fused from."""

    name: str
    offset: tuple[int, int]
    shape: tuple[int, int]

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        return self.shape[0] * self.shape[1]

    def place_of(self, piece: Piece | FlatPiece) -> tuple[slice, slice] | None:
        """Where a piece of the parameter lies in this matrix; None if it lies in another."""
        row, column = (there - here for there, here in zip(piece.global_offset, self.offset, strict=True))
        if not (0 <= row < self.shape[0] and 0 <= column < self.shape[1]):
            return None
        rows, columns = piece.sizes
        assert row + rows <= self.shape[0] and column + columns <= self.shape[1], f"{piece} reaches into two matrices"
        return slice(row, row + rows), slice(column, column + columns)


def matrices_of(name: str, sharding: Sharding) -> Iterator[Matrix]:
    """What was fused is taken apart again: queries, keys and values; gate and up."""
    rows, columns = sharding.shape
    cut = next((cut for cut in sharding.cuts if cut.sections), None)
    if cut is None:
        yield Matrix(name, (0, 0), (rows, columns))
        return
    start = 0
    for section in cut.sections:
        yield Matrix(
            name,
            (start, 0) if cut.dim == 0 else (0, start),
            (section, columns) if cut.dim == 0 else (rows, section),
        )
        start += section


class Slot(NamedTuple):
    """Where in the buffer of its round a matrix lies, in the row of the rank that it was dealt to."""

    matrix: Matrix
    owner: int
    start: int

    def view(self, row: Tensor) -> Tensor:
        """The matrix in this row."""
        return row.narrow(0, self.start, self.matrix.num_elements).view(self.matrix.shape)


class Round(NamedTuple):
    """Matrices that travel together, in rows of `width` elements."""

    slots: tuple[Slot, ...]
    width: int


def deal(matrices: Sequence[Matrix], *, num_ranks: int, most: int = MOST_AT_ONCE) -> Iterator[Round]:
    """The largest first, to one rank after the other, until a round has `most` elements."""
    largest_first = sorted(matrices, key=lambda matrix: -matrix.num_elements)
    slots: list[Slot] = []
    width = 0
    for start in range(0, len(largest_first), num_ranks):
        of_one_size = largest_first[start : start + num_ranks]
        if slots and num_ranks * (width + of_one_size[0].num_elements) > most:
            yield Round(tuple(slots), width)
            slots, width = [], 0
        slots += [Slot(matrix, owner, width) for owner, matrix in enumerate(of_one_size)]
        width += of_one_size[0].num_elements
    if slots:
        yield Round(tuple(slots), width)


class MatrixDistribution:
    """The matrices of the parameters of one reduction domain, dealt to the ranks that hold pieces or copies of them."""

    def __init__(self, masters: Masters, domain: Domain, *, most: int = MOST_AT_ONCE) -> None:
        self._device, self._replicate_axis = masters.device, domain.replicate
        self._summed_over = domain.counting_axes
        self._num_ranks, self._rank = 1, 0
        for axis in (*self._summed_over, self._replicate_axis):
            self._num_ranks, self._rank = self._num_ranks * axis.size, self._rank * axis.size + axis.rank
        matrices = [each for name, sharding in masters.shardings.items() for each in matrices_of(name, sharding)]
        self.rounds = list(deal(matrices, num_ranks=self._num_ranks, most=most))
        self._pieces = {
            matrix: [
                (piece, place)
                for piece in (masters.shards[matrix.name].pieces if matrix.name in masters.parameters else ())
                if (place := matrix.place_of(piece)) is not None
            ]
            for matrix in matrices
        }
        # Of what an axis does not cut, its first rank's copy is summed.
        self._lays_down = {name: sharding.is_counted(domain) for name, sharding in masters.shardings.items()}

    def pieces(self, slot: Slot, buffer: Tensor) -> Iterator[tuple[Piece | FlatPiece, Tensor]]:
        """This rank's pieces of a matrix, each with its place in the buffer of the round."""
        matrix = slot.view(buffer[slot.owner])
        for piece, place in self._pieces[slot.matrix]:
            yield piece, matrix[place]

    def lays_down(self, slot: Slot) -> bool:
        """Whether this rank's pieces of the matrix are the ones that are summed."""
        return self._lays_down[slot.matrix.name]

    def buffer(self, round_: Round) -> Tensor:
        """[ranks, width] zeros, on the device that collectives work on."""
        return torch.zeros(self._num_ranks, round_.width, device=self._device)

    def collect(self, buffer: Tensor) -> Tensor:
        """[ranks, width] of pieces -> [1, width]: the matrices dealt to this rank."""
        for axis in self._summed_over:
            buffer = comm.start_reduce_scatter(buffer, axis).wait()
        return comm.piece_of(buffer, self._replicate_axis)

    def mine(self, round_: Round, row: Tensor) -> Iterator[Tensor]:
        """[1, width] -> the matrices dealt to this rank."""
        for slot in round_.slots:
            if slot.owner == self._rank:
                yield slot.view(row[0])

    def spread(self, row: Tensor) -> Tensor:
        """[1, width] -> [ranks, width]: what all ranks computed."""
        for axis in (self._replicate_axis, *reversed(self._summed_over)):
            row = comm.start_all_gather(row, axis).wait()
        return row
