"""What a step or an evaluation shows, and what may end a run in its midst."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from megatronish.core.errors import RunError
from megatronish.engine.balancing import ExpertLoad
from megatronish.objectives.objective import LOSS

Votes = Callable[[], Mapping[str, float]]
"""Numbers of a rank that are to be summed over all ranks with those of a step, by name."""


def no_votes() -> Mapping[str, float]:
    """Nothing to be summed."""
    return {}


class NotFiniteError(RunError):
    """The loss or the gradient norm became infinite or not a number; `origin` is the rank where it began, if known."""

    def __init__(self, message: str, *, origin: int | None = None) -> None:
        super().__init__(message)
        self.origin = origin


class StepResult(NamedTuple):
    """What a step showed, the same on every rank.

    `metrics` are the means of the objective's sums, "loss" among them. `loss_scale` is what the loss was multiplied by;
    `skipped` says that the gradient overflowed and changed nothing. `votes` are summed over all ranks.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    num_loss_tokens: int
    loss_scale: float = 1.0
    skipped: bool = False
    votes: Mapping[str, float] = MappingProxyType({})
    expert_load: ExpertLoad | None = None
    """Choices of the experts of each layer; None for a dense model."""

    @property
    def loss(self) -> float:
        """The mean over the unmasked predictions."""
        return self.metrics[LOSS]


class Totals(NamedTuple):
    """Sums of an objective over some micro-batches and all ranks, and what they are to be divided by."""

    sums: Mapping[str, float]
    weight: int


class StepSums(NamedTuple):
    """Sums of a step over all ranks: the objective's, those of the model's layers, and the votes of hooks.

    `norm` is that of the gradient, read together with them.
    """

    objective: Mapping[str, float]
    model: Mapping[str, Tensor]
    votes: Mapping[str, float]
    norm: float
