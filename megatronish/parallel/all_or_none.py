"""All or none: work that every rank of an axis finishes, or that fails on all of them with one error.

A rank that fails alone leaves the other ranks waiting in their next collective. So each rank catches its error, all
ranks gather the errors (pickled objects, one for each rank), and all of them raise the error of the lowest failed rank.
The gather is itself a collective: every rank of the axis must enter these functions.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar, cast

from megatronish.core.errors import RunError, UserError
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

T = TypeVar("T")


def all_or_none(axis: Axis, work: Callable[[], T]) -> T:
    """Result of `work`, which every rank of the axis runs; if some fail, all raise the lowest failed rank's error.

    An error other than UserError, RunError and OSError reaches the other ranks as a RuntimeError with its traceback.
    """
    # Phase 1, without communication: the result or the error of this rank.
    result, mine = None, None
    try:
        result = work()
    except Exception as error:
        mine = error
    # Phase 2: the errors of all ranks, None for those that succeeded, in the order of the axis.
    errors: list[Exception | None] = [mine]
    if axis.size > 1:
        errors = comm.all_gather_object(_portable(mine, axis.rank), axis)
    # Phase 3: the same decision on all ranks. The failed rank raises its own error, which has the traceback.
    first = next((rank for rank, error in enumerate(errors) if error is not None), None)
    if first is not None:
        failure = (mine if first == axis.rank else None) or errors[first] or AssertionError()
        failure.origin = axis.ranks[first] if axis.ranks else 0  # type: ignore[attr-defined]  # for launch/rank.py
        raise failure
    return result  # type: ignore[return-value]


def same_on_all(axis: Axis, read: Callable[[], T], *, what: str) -> T:
    """Value of `read`, equal on all ranks; UserError if ranks read different values, as where nodes share no folder."""
    values = from_all(axis, read)
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise UserError(f"rank {other} does not see what rank 0 sees {what}; let all ranks see one folder")
    return values[axis.rank]


def from_one(axis: Axis, work: Callable[[], T], *, rank: int = 0) -> T:
    """Result of `work` on one rank of the axis, on all ranks; its error on all of them, too."""
    results: list[T | None] = from_all(axis, work if axis.rank == rank else lambda: None)
    return cast(T, results[rank])


def from_all(axis: Axis, read: Callable[[], T]) -> list[T]:
    """Values of `read` of all ranks, in the order of the axis."""
    return comm.all_gather_object(all_or_none(axis, read), axis)


def _portable(error: Exception | None, rank: int) -> Exception | None:
    """Error in a form that can be pickled: its class is kept if it is one of ours or an OSError."""
    if error is None or isinstance(error, (UserError, RunError, OSError)):
        return error
    return RuntimeError(f"rank {rank}: " + "".join(traceback.format_exception(error)))
