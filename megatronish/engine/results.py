"""What a step or an evaluation shows, and the one all-reduce of one vector over all ranks that sums it."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.core.errors import RunError
from megatronish.engine.balancing import ExpertLoad
from megatronish.objectives.objective import LOSS
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.ranges import BUBBLE, marked

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


def meet_stages(mesh: Mesh) -> None:
    """Returns when all stages have done their actions: a profile has the end of the bubble here.

    Without it the bubble would be in the first collective that follows, over whatever axis that is.
    """
    with marked(BUBBLE):
        comm.all_reduce(torch.zeros((), device=mesh.device), mesh.pp)


def reduce_sums(
    sums: Mapping[str, Tensor],
    votes: Mapping[str, float],
    norm: Tensor | None = None,
    *,
    objective: Sequence[str],
    model: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
) -> StepSums:
    """The sums of the objective (scalars) and of the model's layers (tensors of these shapes), and the votes.

    Sums differ over data ranks and stages. tp ranks hold the same sums of the objective, so only the first of them
    contributes; what layers count, each rank counts of its own tokens. `norm`, a scalar that is the same on every rank
    already (zero if None), is read with the sums: the host waits for the device once a step.
    """
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    parts = [torch.stack([sums.get(name, zero).double() if mesh.tp.is_first else zero for name in objective])]
    for name, shape in model.items():
        parts.append(sums[name].double().flatten() if name in sums else zero.new_zeros(math.prod(shape)))
    parts.append(torch.tensor(list(votes.values()), dtype=torch.float64).to(mesh.device, non_blocking=True))
    found = torch.cat([comm.all_reduce(torch.cat(parts), mesh.world), (zero if norm is None else norm).view(1)]).cpu()
    pieces = iter(found.split([*(part.numel() for part in parts), 1]))
    return StepSums(
        dict(zip(objective, next(pieces).tolist(), strict=True)),
        {name: next(pieces).view(shape) for name, shape in model.items()},
        dict(zip(votes, next(pieces).tolist(), strict=True)),
        next(pieces).item(),
    )
