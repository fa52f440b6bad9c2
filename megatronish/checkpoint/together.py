"""How do all ranks learn that one of them has failed?"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatronish.errors import RunError, UserError
from megatronish.mesh.groups import Axis

T = TypeVar("T")


def together(axis: Axis, work: Callable[[], T]) -> T:
    """Do `work` on every rank of the axis. If it failed on one, all raise what the first of them raised.

    So nobody goes on to wait for a rank that has given up, and whoever speaks first says what happened.
    """
    result, mine = None, None
    try:
        result = work()
    except Exception as error:
        mine = error
    errors: list[Exception | None] = [mine]
    if axis.size > 1:
        errors = [None] * axis.size
        dist.all_gather_object(errors, _portable(mine, axis.rank), group=axis.group)
    first = next((rank for rank, error in enumerate(errors) if error is not None), None)
    if first is not None:
        raise (mine if first == axis.rank else None) or errors[first] or AssertionError
    return result  # type: ignore[return-value]


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """What can be pickled and says enough."""
    if error is None or isinstance(error, (UserError, RunError, OSError)):
        return error
    return RuntimeError(f"rank {rank}: " + "".join(traceback.format_exception(error)))
