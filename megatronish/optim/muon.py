"""Muon: momentum SGD whose update of each matrix is orthogonalised by Newton-Schulz iterations.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the scale and the decoupled weight decay of Liu et al. 2025
(arXiv:2502.16982). It updates the 2-D weights of the layers, each section of a fused weight (queries, keys and values;
gate and up) as a matrix of its own. Embeddings, head, norms and biases are updated by AdamW.

The whole matrix is orthogonalised, however tp and ZeRO cut it (matrix_distribution.py). Momentum has the shape and the
device of the shard. Where that is the CPU while the model is on a GPU, pieces are copied to the GPU, communicated and
orthogonalised there, and the updates are copied back.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Literal

import torch
from torch import Tensor

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.adam import AdamW
from megatronish.optim.masters import Masters
from megatronish.optim.matrix_distribution import MatrixDistribution, Round
from megatronish.parallel.sharding import FlatPiece, Piece

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
        self._config = config
        self._masters = matrices.parameters
        self._distributions = [MatrixDistribution(*of_domain) for of_domain in matrices.by_domain()]
        self._rest = AdamW(masters.only(masters.shardings.keys() - names), config)
        self._momenta = {name: torch.zeros_like(each, requires_grad=False) for name, each in self._masters.items()}
        self.state = self._rest.state | {name: {"momentum_buffer": each} for name, each in self._momenta.items()}

    @staticmethod
    def described(masters_on: torch.device, /) -> str:
        """Both optimizers, with the reason for AdamW's kernel."""
        return f"Muon for the matrices of layers, else {AdamW.described(masters_on)}"

    def start_after(self, num_steps: int) -> None:
        """Pass the number of steps to AdamW; Muon has no step counter."""
        self._rest.start_after(num_steps)

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update. Every rank of the stage takes part in its collectives, even a rank without masters."""
        # 1. Everything that is not a matrix.
        self._rest.step(learning_rate=learning_rate, weight_decay=weight_decay)
        # 2. Shard by shard, without communication: momentum and decoupled weight decay.
        for name, momentum in self._momenta.items():
            gradient = self._masters[name].grad
            assert gradient is not None
            momentum.lerp_(gradient, 1 - self._config.muon_momentum)
            self._masters[name].mul_(1 - learning_rate * weight_decay)
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
            found = orthogonalized(
                matrix,
                num_steps=config.muon_num_ns_steps,
                kind=config.muon_coefficient_type,
                precision=config.muon_fp32_matmul_prec,
            )
            matrix.copy_(found)
        # 3. Spread: all-gather the rows, [1, width] -> [ranks, width].
        return distribution.spread(row)

    def _directions(self, distribution: MatrixDistribution, round_: Round) -> Tensor:
        """[ranks, width]: this rank's pieces of the directions, and zeros."""
        buffer = distribution.buffer(round_)
        for slot in round_.slots:
            if distribution.contributes(slot):
                for piece, place in distribution.pieces(slot, buffer):
                    place.copy_(self._direction(slot.matrix.name, piece))
        return buffer

    def _direction(self, name: str, piece: Piece | FlatPiece) -> Tensor:
        """The momentum of a piece, or Nesterov's: the momentum averaged with the gradient once more."""
        momentum, gradient = piece.view(self._momenta[name]), self._masters[name].grad
        assert gradient is not None
        if not self._config.muon_nesterov:
            return momentum
        return piece.view(gradient).lerp(momentum, self._config.muon_momentum)

    def _apply(self, distribution: MatrixDistribution, round_: Round, buffer: Tensor, learning_rate: float) -> None:
        """Subtract the updates of this rank's pieces, read from the buffer [ranks, width] of the round."""
        scale = SCALES[self._config.muon_scale_mode]
        for slot in round_.slots:
            factor = learning_rate * self._config.muon_extra_scale_factor * scale(*slot.matrix.shape)
            for piece, place in distribution.pieces(slot, buffer):
                master = self._masters[slot.matrix.name]
                piece.view(master).sub_(place.to(master.device), alpha=factor)
