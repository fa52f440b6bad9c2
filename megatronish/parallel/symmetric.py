"""Products with their exchange in one operator of torch's, over symmetric memory: memory that peers on a machine read.

A ring of pieces by p2p (layers/ring_products.py) has kernels of NCCL that take a part of the device from the product.
Here copies by the device's own engines take their place, piece by piece on a second stream. The operators are torch's
(torch.distributed._symmetric_memory): prototypes, whose names and forms were read and which have not run here, as they
need several GPUs of one machine. What they compute is tested by torch's own fallbacks.
"""

import socket
from typing import Any

import torch
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


def can_share(axis: Axis, device: torch.device) -> bool:
    """Whether the ranks of an axis can read each other's memory: GPUs of one machine, with a torch that has operators.

    Ranks say where they are, for a launcher may place them as it likes. Where each sees one GPU alone, none can tell
    whether there is a way between them: they do not share.
    """
    if device.type != "cuda" or axis.group is None or axis.group.name() == "fake" or _operators() is None:
        return False
    own = device.index or 0
    places = comm.all_gather_object((socket.gethostname(), own), axis)
    gpus = {index for _, index in places}
    if len({host for host, _ in places}) > 1 or len(gpus) < axis.size:
        return False
    sees_all = max(gpus) < torch.cuda.device_count()
    can_read = sees_all and all(torch.cuda.can_device_access_peer(own, other) for other in gpus - {own})
    return all(comm.all_gather_object(can_read, axis))  # one answer for all: the operators are collective


def gathered_product(x: Tensor, matrix: Tensor, axis: Axis, *, keeps: bool = False) -> tuple[Tensor | None, Tensor]:
    """[s, B, in], this rank's piece; [in, out] -> [S, B, in] if it `keeps` what is gathered, and [S, B, out]."""
    operators, name = _operators(), _name(axis)
    assert operators is not None
    with comm.entered("all_gather_product", axis):
        whole, (y,) = operators.fused_all_gather_matmul(x.contiguous(), [matrix], 0, name, return_A=keeps)
    return whole, y


def scattered_product(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    """[S, B, in], [in, out] -> [s, B, out]: this rank's piece of the sum of the products of all ranks."""
    operators, name = _operators(), _name(axis)
    assert operators is not None
    with comm.entered("reduce_scatter_product", axis):
        y: Tensor = operators.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, name)
    return y


def _operators() -> Any:
    """torch's operators; None in a torch without them."""
    operators = comm.symmetric_operators()
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return operators if all(hasattr(operators, name) for name in names) else None


def _name(axis: Axis) -> str:
    assert axis.group is not None
    return axis.group.group_name
