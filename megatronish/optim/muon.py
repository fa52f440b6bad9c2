"""Muon: the step of a matrix is its momentum, made nearly orthogonal.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the scale and the decoupled weight decay of Liu et al. 2025
(arXiv:2502.16982). A matrix here is what multiplies hidden states: the 2-D weights of the layers, each section of a
fused one (queries, keys and values; gate and up) by itself. Embeddings, head, norms and biases are AdamW's.

The whole matrix is orthogonalised, however tp and ZeRO cut it (matrix_distribution.py). Momentum stays
in the shape, and in the memory, of the shard; where that is the CPU's while the model is on a GPU, pieces are copied to
the GPU, which sends, orthogonalises and hands back the steps.
"""

import math
from collections.abc import Callable
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from megatronish.config.optimizer import OptimizerConfig
from megatronish.optim.adam import AdamW
from megatronish.optim.masters import Masters
from megatronish.optim.matrix_distribution import MatrixDistribution, Round
from megatronish.sharding import FlatPiece, Piece

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
"""What a step is multiplied by, for --muon-scale-mode."""

SMALLEST_NORM = 1e-7  # of a matrix that is scaled to 1: below it there is nothing but rounding


def orthogonalized(matrix: Tensor, *, num_steps: int, kind: str) -> Tensor:
    """[m, n] -> [m, n]: singular values brought near 1, by polynomials, without finding any.

    quintic takes those of a random matrix to 0.98 .. 1.03, simple to 0.7 .. 1.2. Small ones grow by 490 at most in five
    steps: so what two layouts round differently, 1e-7 of the matrix's norm, ends as 5e-5 of a step even where the
    matrix lacks ranks. (Adam would make whole steps of it.)
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = wide / torch.linalg.vector_norm(wide).clamp_min(SMALLEST_NORM)
    coefficients = COEFFICIENTS[kind]
    for a, b, c in islice(chain(coefficients, repeat(coefficients[-1])), num_steps):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.mT


class Muon:
    """Muon for matrices, AdamW for the rest. Both are given the same learning rate and weight decay."""

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        # Rows of embeddings and of the head belong to tokens: no product mixes them, so they are AdamW's.
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
        """Both optimizers."""
        return f"Muon for the matrices of layers, else {AdamW.described(masters_on)}"

    def start_after(self, num_steps: int) -> None:
        """Muon itself does not count."""
        self._rest.start_after(num_steps)

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Every rank of the stage sends and computes its share, whatever it holds."""
        self._rest.step(learning_rate=learning_rate, weight_decay=weight_decay)
        for name, momentum in self._momenta.items():
            gradient = self._masters[name].grad
            assert gradient is not None
            momentum.lerp_(gradient, 1 - self._config.muon_momentum)
            self._masters[name].mul_(1 - learning_rate * weight_decay)
        for distribution in self._distributions:
            for round_ in distribution.rounds:
                self._apply(distribution, round_, self._orthogonalized(distribution, round_), learning_rate)

    def _orthogonalized(self, distribution: MatrixDistribution, round_: Round) -> Tensor:
        """The matrices of a round, whole, in its buffer."""
        config, buffer = self._config, distribution.buffer(round_)
        for slot in round_.slots:
            if distribution.lays_down(slot):
                for piece, place in distribution.pieces(slot, buffer):
                    place.copy_(self._direction(slot.matrix.name, piece))
        row = distribution.collect(buffer)
        for matrix in distribution.mine(round_, row):
            kind = config.muon_coefficient_type
            matrix.copy_(orthogonalized(matrix, num_steps=config.muon_num_ns_steps, kind=kind))
        return distribution.spread(row)

    def _direction(self, name: str, piece: Piece | FlatPiece) -> Tensor:
        """The momentum of a piece; Nesterov's looks one step ahead."""
        momentum, gradient = piece.view(self._momenta[name]), self._masters[name].grad
        assert gradient is not None
        if not self._config.muon_nesterov:
            return momentum
        return piece.view(gradient).lerp(momentum, self._config.muon_momentum)

    def _apply(self, distribution: MatrixDistribution, round_: Round, buffer: Tensor, learning_rate: float) -> None:
        """Take this rank's pieces of the steps out of the buffer of the round."""
        scale = SCALES[self._config.muon_scale_mode]
        for slot in round_.slots:
            factor = learning_rate * self._config.muon_extra_scale_factor * scale(*slot.matrix.shape)
            for piece, place in distribution.pieces(slot, buffer):
                master = self._masters[slot.matrix.name]
                piece.view(master).sub_(place.to(master.device), alpha=factor)
