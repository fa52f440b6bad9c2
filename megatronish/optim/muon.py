"""Muon: momentum SGD whose update of each matrix is orthogonalised by Newton-Schulz iterations.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the scale and the decoupled weight decay of Liu et al. 2025
(arXiv:2502.16982). It updates the 2-D weights of the layers, each section of a fused weight (queries, keys and values;
gate and up) as a matrix of its own. Embeddings, head, norms and biases are updated by AdamW.

The whole matrix is orthogonalised, however tp and ZeRO cut it (`MatrixDistribution`). Momentum has the shape and the
device of the shard. Where that is the CPU while the model is on a GPU, pieces are copied to the GPU, communicated and
orthogonalised there, and the updates are copied back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, product, repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.fused import AdamW
from megatronish.optim.masters import Masters, states_of
from megatronish.parallel import comm
from megatronish.parallel.bucketing import MOST_AT_ONCE, round_sizes
from megatronish.parallel.disk import in_chunks
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import FlatPiece, Piece, Sharding

# Matrix distribution: whole matrices for an optimizer when every rank holds only pieces of them.
#
# tp cuts a weight by rows or by columns, ZeRO keeps any run of its elements, `fully_shard` some of its rows. A piece
# knows where it lies in the global tensor, which is enough to assemble whole matrices, each on one rank, its owner:
#
#     collect   Each rank copies its pieces into a buffer of zeros [ranks, width], which has a row for every owner. A
#               reduce-scatter over each axis that cuts parameters adds the buffers up and leaves each rank its own row.
#               The result is exact: every element is one value plus zeros.
#     compute   Each rank computes on the matrices that it owns; no two ranks compute the same.
#     spread    All-gathers give every rank all rows again, and each rank reads the elements of its own pieces.
#
# Ranks that hold replicas own different matrices, too, and receive the same bits. With R ranks (tp, shard and replicate
# axes of a stage) and M elements of matrices, a rank sends about 2 M (R - 1) / R elements and computes 1 / R of the
# work. Matrices are processed in rounds, the largest first, so that matrices of a round are of nearly equal size. The
# buffer of a round has MOST_AT_ONCE elements, or R times the largest matrix where that is more.


class Matrix(NamedTuple):
    """A parameter that is one matrix, one section of a fused parameter, or one of a stack (an expert's).

    `offset` is that of its first element in the parameter, of all dims.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def num_elements(self) -> int:
        """Elements of the matrix: rows times columns."""
        return self.shape[0] * self.shape[1]

    def part_of(self, piece: Piece | FlatPiece) -> tuple[Piece | FlatPiece, tuple[slice, slice]] | None:
        """What a piece of the parameter has of this matrix, and its rows and columns; None if it has nothing."""
        stack = len(self.offset) - 2
        *index, row, column = (there - here for there, here in zip(self.offset, piece.global_offset, strict=True))
        # 1. Of a stack of matrices a piece may hold several: the one at `index` of the piece.
        if not all(0 <= place < size for place, size in zip(index, piece.sizes, strict=False)):
            return None
        # 2. Where the piece begins inside the matrix.
        row, column = -row, -column
        if not (0 <= row < self.shape[0] and 0 <= column < self.shape[1]):
            return None
        rows, columns = piece.sizes[stack:]
        assert row + rows <= self.shape[0] and column + columns <= self.shape[1], f"{piece} reaches into two matrices"
        return _at(piece, tuple(index)), (slice(row, row + rows), slice(column, column + columns))


def _at(piece: Piece | FlatPiece, index: tuple[int, ...]) -> Piece | FlatPiece:
    """The matrix at this index of a piece's first dims; the piece itself where it is no stack."""
    if not index:
        return piece
    stack = len(index)
    # Offsets of one matrix of the piece in the global tensor; sizes 1 in the dims of the stack, so that it still is a
    # rectangle of the same dims.
    offset = (
        *(start + place for start, place in zip(piece.global_offset, index, strict=False)),
        *piece.global_offset[stack:],
    )
    sizes = (*(1 for _ in index), *piece.sizes[stack:])
    if isinstance(piece, FlatPiece):
        # Matrices of a flat piece lie one behind the other, the last dim of the stack fastest.
        number = 0
        for place, size in zip(index, piece.sizes, strict=False):
            number = number * size + place
        return FlatPiece(offset, piece.start + number * piece.sizes[-2] * piece.sizes[-1], sizes)
    local = (
        *(start + place for start, place in zip(piece.local_offset, index, strict=False)),
        *piece.local_offset[stack:],
    )
    return Piece(offset, local, sizes)


def matrices_of(name: str, sharding: Sharding) -> Iterator[Matrix]:
    """The matrices of a parameter: one for each section of a fused one (q, k, v; gate, up), or each of a stack."""
    # Each section of a fused weight is a layer of its own: orthogonalised as one matrix, queries would be mixed with
    # keys.
    *stack, rows, columns = sharding.shape
    cut = next((cut for cut in sharding.cuts if cut.sections), None)
    if cut is None:
        for index in product(*(range(size) for size in stack)):
            yield Matrix(name, (*index, 0, 0), (rows, columns))
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
    """Place of a matrix in the buffer of its round: the owner's row, and the first element in that row."""

    matrix: Matrix
    owner: int
    start: int

    def view(self, row: Tensor) -> Tensor:
        """[width] -> the matrix [rows, columns], a view of the owner's row."""
        return row.narrow(0, self.start, self.matrix.num_elements).view(self.matrix.shape)


class Round(NamedTuple):
    """Matrices that share one buffer [ranks, width]."""

    slots: tuple[Slot, ...]
    width: int


def deal(matrices: Sequence[Matrix], *, num_ranks: int, most: int = MOST_AT_ONCE) -> Iterator[Round]:
    """Rounds of at most `most` buffer elements (or one matrix a rank), the largest matrices first."""
    # Owners take turns: num_ranks matrices of nearly equal size share a span of the rows, as wide as the first of them.
    # All ranks compute the same rounds, so they are communicated nowhere.
    largest_first = sorted(matrices, key=lambda matrix: -matrix.num_elements)
    begin = 0
    for number, width in round_sizes([each.num_elements for each in largest_first], num_ranks=num_ranks, most=most):
        slots: list[Slot] = []
        start = 0
        for place, matrix in enumerate(largest_first[begin : begin + number]):
            owner = place % num_ranks
            slots.append(Slot(matrix, owner, start))
            if owner == num_ranks - 1:  # the next ones lie behind the largest of these
                start += slots[place - owner].matrix.num_elements
        yield Round(tuple(slots), width)
        begin += number


class MatrixDistribution:
    """The matrices of one reduction domain, each owned by one of the ranks that hold its pieces or replicas.

    Every rank of the domain's axes calls `collect` and `spread` for the same rounds, in the same order.
    """

    def __init__(self, masters: Masters, domain: Domain, *, most: int = MOST_AT_ONCE) -> None:
        self._device, self._replicate_axis = masters.device, domain.replicate
        self._summed_over = domain.counting_axes
        # A rank's index among the owners: the first axis varies slowest, as reduce-scatters over the axes in this order
        # cut the rows of the buffer.
        self._num_ranks, self._rank = 1, 0
        for axis in (*self._summed_over, self._replicate_axis):
            self._num_ranks, self._rank = self._num_ranks * axis.size, self._rank * axis.size + axis.rank
        matrices = [each for name, sharding in masters.shardings.items() for each in matrices_of(name, sharding)]
        self.rounds = list(deal(matrices, num_ranks=self._num_ranks, most=most))
        # A parameter of which this rank keeps nothing has no pieces here; the rank takes part in its rounds all the
        # same.
        self._pieces = {
            matrix: [
                part
                for piece in (masters.shards[matrix.name].pieces if matrix.name in masters.parameters else ())
                if (part := matrix.part_of(piece)) is not None
            ]
            for matrix in matrices
        }
        # A parameter that an axis does not cut is the same on all its ranks: only one contributes it to the sum.
        self._contributes = {name: sharding.is_counted(domain) for name, sharding in masters.shardings.items()}

    def pieces(self, slot: Slot, buffer: Tensor) -> Iterator[tuple[Piece | FlatPiece, Tensor]]:
        """This rank's pieces of a matrix, each with the view [..., rows, columns] of its place in the buffer."""
        matrix = slot.view(buffer[slot.owner])
        for piece, place in self._pieces[slot.matrix]:
            yield piece, matrix[place][(None,) * (len(piece.sizes) - 2)]

    def contributes(self, slot: Slot) -> bool:
        """Whether this rank's pieces of the matrix go into the sum, and not a copy on another rank."""
        return self._contributes[slot.matrix.name]

    def buffer(self, round_: Round) -> Tensor:
        """[ranks, width] zeros, on the device that collectives work on."""
        return torch.zeros(self._num_ranks, round_.width, device=self._device)

    def collect(self, buffer: Tensor) -> Tensor:
        """[ranks, width] of pieces -> [1, width]: the whole matrices that this rank owns."""
        # 1. Each axis that cuts parameters adds the buffers of its ranks and leaves each the rows of its part:
        #    [ranks, width] -> [ranks / axis.size, width] -> ... -> [replicas, width].
        for axis in self._summed_over:
            buffer = comm.start_reduce_scatter(buffer, axis).wait()
        # 2. Replicas now have the same rows, and each keeps its own without communication: as a copy, for a view would
        #    keep the rows of all of them in memory.
        mine = comm.piece_of(buffer, self._replicate_axis)
        return mine if self._replicate_axis.size == 1 else mine.clone()

    def owned(self, round_: Round, row: Tensor) -> Iterator[Tensor]:
        """[1, width] -> the matrices that this rank owns, as views."""
        for slot in round_.slots:
            if slot.owner == self._rank:
                yield slot.view(row[0])

    def spread(self, row: Tensor) -> Tensor:
        """[1, width] -> [ranks, width]: the matrices of all owners."""
        # The axes of `collect` in reverse: the rows come back in the order in which they were cut.
        for axis in (self._replicate_axis, *reversed(self._summed_over)):
            row = comm.start_all_gather(row, axis).wait()
        return row


COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""a, b, c of each step x -> a x + b x^3 + c x^5; steps beyond the last repeat it. Jordan's, and You Jiacheng's."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""The factor of an orthogonalised update [rows, columns], by --muon-scale-mode."""

SMALLEST_NORM = 1e-7  # a matrix of a smaller norm is not scaled up to norm 1: it is nothing but rounding


Precision = Literal["highest", "high", "medium"]
"""Of matrix products, by torch's names: fp32, TF32, bf16."""


def orthogonalized(matrix: Tensor, *, num_steps: int, kind: str, precision: Precision = "highest") -> Tensor:
    """[m, n] -> [m, n]: U V^T of the SVD U S V^T, approximately, by Newton-Schulz iterations.

    `kind` is a key of COEFFICIENTS. The singular values of a random matrix end in 0.98 .. 1.03 with quintic, in
    0.7 .. 1.2 with simple. Five steps amplify a small singular value by at most 490: a rounding difference between two
    layouts, 1e-7 of the matrix's norm, becomes 5e-5 of an update even where the matrix is rank-deficient. In bf16, as
    in Jordan's code, singular values end in a band that is wider by a few percent, and so do layouts differ.
    """
    # 1. Work on the wide side, m <= n, so that the products below are [m, m]; scale to norm 1, so that no singular
    #    value exceeds 1.
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = wide / torch.linalg.vector_norm(wide).clamp_min(SMALLEST_NORM)
    if precision == "medium":
        x = x.bfloat16()
    coefficients = COEFFICIENTS[kind]
    # 2. x -> a x + (b X X^T + c (X X^T)^2) x: a polynomial of the singular values that moves them towards 1.
    with _products_of(precision, x):
        for a, b, c in islice(chain(coefficients, repeat(coefficients[-1])), num_steps):
            square = x @ x.mT
            x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrix else x.mT).to(matrix.dtype)


@contextmanager
def _products_of(precision: Precision, x: Tensor) -> Iterator[None]:
    """On CUDA, fp32 products in TF32 for this block, if `precision` says so; everything else stays as it was set."""
    before = torch.get_float32_matmul_precision()
    if precision == "high" and x.is_cuda:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if torch.get_float32_matmul_precision() != before:
            torch.set_float32_matmul_precision(before)


class Muon:
    """Muon for matrices, AdamW for all other parameters, with the same learning rate and weight decay."""

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        # Rows of embeddings and of the head belong to single tokens and are not mixed by a product: AdamW updates them.
        names = {name for name, sharding in masters.shardings.items() if sharding.role == "matrix"}
        matrices = masters.only(names)
        self._config, self._momentum = config, config.muon_momentum
        self._matrices, self._masters = matrices, matrices.parameters
        self._distributions = [MatrixDistribution(*of_domain) for of_domain in matrices.by_domain()]
        self._rest = AdamW(masters.only(masters.shardings.keys() - names), config)
        of_matrices = states_of(self._masters, ["momentum_buffer"])
        self._momenta = {name: state["momentum_buffer"] for name, state in of_matrices.items()}
        self.state = self._rest.state | of_matrices

    @staticmethod
    def described(masters_on: torch.device, /) -> str:
        """Both optimizers, with the reason for AdamW's kernel."""
        return f"Muon for the matrices of layers, else {AdamW.described(masters_on)}"

    def start_after(self, num_steps: int) -> None:
        """Pass the number of steps to AdamW; Muon has no step counter."""
        self._rest.start_after(num_steps)

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float, momentum: float | None = None) -> None:
        """One update. Every rank of the stage takes part in its collectives, even a rank without masters.

        A momentum that is given is that of matrices, and AdamW's beta1.
        """
        self._momentum = self._config.muon_momentum if momentum is None else momentum
        # 1. Everything that is not a matrix.
        self._rest.step(learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum)
        # 2. Shard by shard, without communication: momentum and decoupled weight decay.
        names = list(self._momenta)
        for chunk in in_chunks([(self._momenta[name], self._masters[name]) for name in names], num_written=2):
            for part, (mean, master) in chunk:
                gradient = self._matrices.gradient_of(names[part.number]).view(-1)[part.begin : part.end]
                mean.lerp_(gradient.to(mean.device), 1 - self._momentum)
                master.mul_(1 - learning_rate * weight_decay)
        # 3. Round by round: whole matrices on their owners, orthogonalised, and back into the shards.
        for distribution in self._distributions:
            for round_ in distribution.rounds:
                self._apply(distribution, round_, self._orthogonalized(distribution, round_), learning_rate)

    def _orthogonalized(self, distribution: MatrixDistribution, round_: Round) -> Tensor:
        """[ranks, width]: the orthogonalised matrices of a round, each whole, in the row of its owner."""
        config = self._config
        # 1. Reduce-scatter the pieces. No name keeps their buffer, which is as large as that of the result.
        row = distribution.collect(self._directions(distribution, round_))
        # 2. Orthogonalise the matrices that this rank owns, in place in its row [1, width].
        for matrix in distribution.owned(round_, row):
            update = orthogonalized(
                matrix,
                num_steps=config.muon_num_ns_steps,
                kind=config.muon_coefficient_type,
                precision=config.muon_fp32_matmul_prec,
            )
            matrix.copy_(update)
        # 3. Spread: all-gather the rows, [1, width] -> [ranks, width].
        return distribution.spread(row)

    def _directions(self, distribution: MatrixDistribution, round_: Round) -> Tensor:
        """[ranks, width]: this rank's pieces of the directions, and zeros."""
        buffer = distribution.buffer(round_)
        pieces = [
            (slot.matrix.name, *pair)
            for slot in round_.slots
            if distribution.contributes(slot)
            for pair in distribution.pieces(slot, buffer)
        ]
        momenta = [piece.view(self._momenta[name]) for name, piece, _ in pieces]
        parts = list[Tensor]()  # of a piece that is cut, because it lies on a disk
        for chunk in in_chunks([(each,) for each in momenta], num_written=0):
            for part, (momentum,) in chunk:
                name, piece, place = pieces[part.number]
                gradient = piece.view(self._matrices.gradient_of(name)).view(-1)[part.begin : part.end]
                parts.append(self._direction(momentum, gradient))
                if part.end == place.numel():
                    direction = parts[0] if len(parts) == 1 else torch.cat(parts)
                    place.copy_(direction.view(place.shape))
                    parts.clear()
                elif parts[-1] is momentum:  # which the next chunk takes the place of
                    parts[-1] = momentum.clone()
        return buffer

    def _direction(self, momentum: Tensor, gradient: Tensor) -> Tensor:
        """The momentum, or Nesterov's: the momentum averaged with the gradient once more."""
        if not self._config.muon_nesterov:
            return momentum
        return gradient.to(momentum.device).lerp(momentum, self._momentum)

    def _apply(self, distribution: MatrixDistribution, round_: Round, buffer: Tensor, learning_rate: float) -> None:
        """Subtract the updates of this rank's pieces, read from the buffer [ranks, width] of the round."""
        scale = SCALES[self._config.muon_scale_mode]
        pieces = [
            (slot.matrix, piece.view(self._masters[slot.matrix.name].detach()), place)
            for slot in round_.slots
            for piece, place in distribution.pieces(slot, buffer)
        ]
        for chunk in in_chunks([(master,) for _, master, _ in pieces], num_written=1):
            for part, (master,) in chunk:
                matrix, piece, place = pieces[part.number]
                # By the whole matrix's shape, never by that of a piece.
                factor = learning_rate * self._config.muon_extra_scale_factor * scale(*matrix.shape)
                if len(master) == piece.numel():
                    master.view(place.shape).sub_(place.to(master.device), alpha=factor)
                else:
                    update = place.reshape(-1)[part.begin : part.end]
                    master.sub_(update.to(master.device), alpha=factor)
