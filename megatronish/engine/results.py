"""Results of a step: one all-reduce of one vector sums them over all ranks, and checks may refuse the step.

The update rule decides what becomes of a gradient between its reduction and the optimizer.

In the first step a gradient has to arrive at every parameter that learns (`GradientArrivals`). A layer that is cut out
of autograd, for example by a block that detaches its input, would keep its initial values for the whole run, and no
loss would show it. A gradient that is zero has arrived: that of LoRA's A is zero in the first step, for B is. Autograd
reports what arrives by hooks, which are removed after the step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatronish.core.errors import RunError
from megatronish.engine.balancing import ExpertLoad
from megatronish.objectives.objective import LOSS
from megatronish.optim.loss_scale import LossScale, NormSpikes
from megatronish.optim.optimizer import Optimizer
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.data_parallel.data_parallel import DataParallel
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.sharding import Sharding

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
    `skipped` says that the gradient changed nothing, as it overflowed or was far longer than usual
    (--skip-loss-spikes). `votes` are summed over all ranks. Of several islands (DiLoCo) `grad_norm` is the mean.
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


class StepSums(NamedTuple):
    """Sums of a step or an evaluation over all ranks: the objective's, those of the model's layers, and hooks' votes.

    `weight` is what divides the objective's. `norm` is that of the gradient of this rank's island (0 in an evaluation),
    and `mean_norm` the mean of those of all islands; without islands it is the same.
    """

    objective: Mapping[str, float]
    model: Mapping[str, Tensor]
    votes: Mapping[str, float]
    weight: int
    norm: float
    mean_norm: float


def reduce_sums(
    sums: Mapping[str, Tensor],
    votes: Mapping[str, float],
    norm: Tensor | None = None,
    *,
    weight: int,
    objective: Sequence[str],
    model: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
) -> StepSums:
    """The sums of the objective (scalars) and of the model's layers (tensors of these shapes), and the votes.

    Sums differ over data ranks and stages. tp ranks hold the same sums of the objective, so only the first of them
    contributes; what layers count, each rank counts of its own tokens. `weight`, and `norm` (a scalar, zero if None),
    are the same on all ranks of an island already: one of these contributes. The host waits for the device once a step.
    """
    zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
    parts = [torch.stack([sums.get(name, zero).double() if mesh.tp.is_first else zero for name in objective])]
    for name, shape in model.items():
        parts.append(sums[name].double().flatten() if name in sums else zero.new_zeros(math.prod(shape)))
    parts.append(torch.tensor(list(votes.values()), dtype=torch.float64).to(mesh.device, non_blocking=True))
    own = (zero if norm is None else norm).view(1)
    if mesh.islands.size > 1:
        of_island = torch.cat([own.new_full((1,), weight), own])
        parts.append(of_island if mesh.speaks_for_island else torch.zeros_like(of_island))
    totals = torch.cat([comm.all_reduce(torch.cat(parts), mesh.world), own]).cpu()
    pieces = iter(totals.split([*(part.numel() for part in parts), 1]))
    sums_of_objective = dict(zip(objective, next(pieces).tolist(), strict=True))
    sums_of_model = {name: next(pieces).view(shape) for name, shape in model.items()}
    sums_of_votes = dict(zip(votes, next(pieces).tolist(), strict=True))
    weights, norms = next(pieces).tolist() if mesh.islands.size > 1 else (weight, None)
    (own_norm,) = next(pieces).tolist()
    mean_norm = own_norm if norms is None else norms / mesh.islands.size
    return StepSums(sums_of_objective, sums_of_model, sums_of_votes, int(weights), own_norm, mean_norm)


class UpdateRule(NamedTuple):
    """Loss scale, clipping, steps that are skipped, and the check for what is not finite."""

    loss_scale: LossScale
    clip_grad: float
    check_finite: bool
    spikes: NormSpikes

    def factor(self, grad_norm: float) -> float:
        """What the gradient is multiplied by: it takes the loss scale out, and shortens what is above `clip_grad`."""
        factor = 1.0 / self.loss_scale.scale
        if self.clip_grad > 0 and grad_norm > self.clip_grad:
            factor *= self.clip_grad / (grad_norm + 1e-6)
        return factor

    def shorten(self, grad_norm: float, data_parallel: DataParallel, optimizer: Optimizer) -> float:
        """Multiply the gradient by `factor`, or return what an optimizer that `divides` is to divide it by: else 1."""
        factor = self.factor(grad_norm)
        if factor == 1.0 or optimizer.divides:
            return 1.0 / factor
        data_parallel.scale(factor)
        return 1.0

    def skips(self, grad_norm: float, *, step: int) -> bool:
        """Whether a step is left out: its gradient overflowed in fp16, or is far longer than usual."""
        if not math.isfinite(grad_norm):
            return self.loss_scale.skips_overflow
        return self.spikes.skips(grad_norm, step=step)

    def refuse_not_finite(self, loss: float, grad_norm: float, *, step: int, origin: str | None = None) -> None:
        """NotFiniteError, unless a smaller loss scale may help: then the step is left out and the run continues.

        `origin` says where the first number was that was not finite, if that is known.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite or not self.check_finite or self.loss_scale.can_shrink:
            return
        scale = self.loss_scale.scale
        too_large = f"; the loss scale of {scale} may be too large for fp16, too" if scale > 1 else ""
        where = f": {origin}" if origin else ""
        raise NotFiniteError(
            f"loss={loss} and grad_norm={grad_norm} in step {step} must be finite{where}; the parameters are as they "
            f"were before this step. Lower --lr, lengthen the warm-up, or look at the data of this step{too_large}"
        )


NAMED = 3
"""Parameters that the error names."""


class GradientArrivals:
    """Learning parameters of this rank at which no gradient has arrived yet, until they are checked for once.

    Those that every stage holds are left out: a stage need not have a layer that reads them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], shardings: Mapping[str, Sharding]) -> None:
        learning = (name for name, parameter in parameters.items() if parameter.requires_grad)
        self._missing = {name: None for name in learning if not shardings[name].is_shared}
        self._hooks: list[RemovableHandle] | None = [
            parameters[name].register_post_accumulate_grad_hook(_Arrived(self._missing, name)) for name in self._missing
        ]

    def check(self, axis: Axis) -> None:
        """RunError on all ranks of the axis, the first time, if a parameter of one of them has had no gradient."""
        if self._hooks is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = None
            all_or_none(axis, self._refuse_missing)

    def _refuse_missing(self) -> None:
        if not self._missing:
            return
        first, number = ", ".join(list(self._missing)[:NAMED]), len(self._missing)
        more = f" and {number - NAMED} more parameters" if number > NAMED else ""
        raise RunError(
            f"no gradient has reached {first}{more} in the first step, so they would never learn; look for a detach(), "
            "a no_grad() or an unused module on the way from them to the loss, or freeze them (requires_grad=False)"
        )


class _Arrived:
    """Hook that crosses a name off. It holds no parameter, so that nothing keeps a model alive."""

    def __init__(self, missing: dict[str, None], name: str) -> None:
        self.missing, self.name = missing, name

    def __call__(self, _parameter: nn.Parameter) -> None:
        self.missing.pop(self.name, None)
