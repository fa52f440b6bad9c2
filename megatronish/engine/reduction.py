"""Reduction of a step's sums: one all-reduce of one vector over all ranks, and where stages meet before it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatronish.engine.results import StepSums
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.ranges import BUBBLE, marked


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
