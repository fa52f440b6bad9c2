"""How long is the whole gradient? Its norm over all ranks, each element counted once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh import Axis

ROW = 2048


def global_norm(counted: Iterable[Tensor], *, over: Sequence[Axis], device: torch.device) -> float:
    """The 2-norm of all elements over these axes: `counted` are tensors whose elements this rank counts.

    What several ranks hold (tp ranks a norm, both holders a tied embedding, data ranks what is copied), one counts.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in counted:
        total += sum_of_squares(part).to(device)
    for axis in over:
        comm.all_reduce(total, axis)
    return float(total.sqrt())


def sum_of_squares(x: Tensor) -> Tensor:
    """[...] -> scalar in fp64, exact to about 1e-7.

    One fp32 norm over all elements is not: torch adds them up in a few fp32 lanes, and over 8 million gradients of
    wide spread the result is off by 4e-4. So each ROW has an fp32 norm of its own, and fp64 adds up the rows.
    """
    flat = x.reshape(-1)
    whole = flat.numel() // ROW * ROW
    parts = (flat[:whole].view(-1, ROW), flat[whole:].view(1, -1))
    rows, rest = (torch.linalg.vector_norm(part, dim=1).double().square().sum() for part in parts)
    return rows + rest


def num_zeros(counted: Iterable[Tensor], *, over: Sequence[Axis], device: torch.device) -> int:
    """Elements that are exactly zero, counted in the same way."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in counted:
        total += part.numel() - int(torch.count_nonzero(part))
    for axis in over:
        comm.all_reduce(total, axis)
    return int(total)
