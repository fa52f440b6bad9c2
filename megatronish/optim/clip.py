"""How long is the whole gradient? Its norm over all ranks, each element counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh.groups import Axis


def global_norm(counted: Iterable[Tensor], *, tp: Axis, pp: Axis, device: torch.device) -> float:
    """The 2-norm of all elements: `counted` are the flat tensors whose elements this rank counts.

    What tp ranks or the holders of a tied embedding have in common, one of them counts; data ranks hold the same.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in counted:
        total += torch.linalg.vector_norm(flat).double().square()
    return float(comm.all_reduce(comm.all_reduce(total, tp), pp).sqrt())


def num_zeros(counted: Iterable[Tensor], *, tp: Axis, pp: Axis, device: torch.device) -> int:
    """Elements that are exactly zero, counted in the same way."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for flat in counted:
        total += flat.numel() - torch.count_nonzero(flat)
    return int(comm.all_reduce(comm.all_reduce(total, tp), pp))
