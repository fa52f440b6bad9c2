"""How do all ranks learn that one of them has failed?"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatronish.errors import RunError, UserError
from megatronish.mesh import Axis

T = TypeVar("T")


def all_or_none(axis: Axis, work: Callable[[], T]) -> T:
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


def same_on_all(axis: Axis, look: Callable[[], T], *, what: str) -> T:
    """What `look` finds on every rank; UserError if ranks find different things, as with folders of their own."""
    mine = all_or_none(axis, look)
    found: list[T] = [mine] * axis.size
    if axis.size > 1:
        dist.all_gather_object(found, mine, group=axis.group)
    other = next((rank for rank, seen in enumerate(found) if seen != found[0]), None)
    if other is not None:
        raise UserError(f"rank {other} does not see what rank 0 sees {what}; let all ranks see one folder")
    return mine


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """What can be pickled and says enough."""
    if error is None or isinstance(error, (UserError, RunError, OSError)):
        return error
    return RuntimeError(f"rank {rank}: " + "".join(traceback.format_exception(error)))
