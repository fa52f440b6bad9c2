"""Happens-before check of asynchronous collectives: no access to a buffer that is under way.

On CPU a rank computes and communicates in one order of calls, and whether a missing `wait` shows depends on time. This
check does not depend on time. A dispatch mode sees every operator of the thread, collectives included, and keeps, for
each collective that was started and not yet waited for, the bytes that it reads and the bytes that it writes. Another
operator that reads what is being written, or that writes what is being read or written, is a race: on a GPU the two are
on different streams. `Work.wait` ends a collective. One that is never waited for is reported at the end.

Views are no access, nor are operators that look at a shape alone. Memory of a tensor is taken as one interval, from its
first byte to its last. What the host reads without an operator (`tolist`, `numpy`) and storages that change their size
are seen, too.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, wraps
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatronish.launch.place import Place

PACKAGE = str(ROOT / "megatronish")
TRANSPARENT = ("comm.py", "ranges.py")  # whose callers are the call sites

# Operators that look at shape, dtype or device of an argument, and at none of its values.
SHAPES_ALONE = (
    "new_",
    "empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "sym_",
    "is_same_size",
)


class RaceError(AssertionError):
    """An access to a buffer that is under way, or a collective that was never waited for."""


class Bytes(NamedTuple):
    """Interval of memory, [first, end)."""

    first: int
    end: int

    def meets(self, other: "Bytes") -> bool:
        """Whether the two share a byte."""
        return self.first < other.end and other.first < self.end

    def without(self, other: "Bytes") -> list["Bytes"]:
        """What is left of it."""
        if not self.meets(other):
            return [self]
        ends = [Bytes(self.first, other.first), Bytes(other.end, self.end)]
        return [each for each in ends if each.first < each.end]


class Access(NamedTuple):
    """What an operator reads and writes."""

    reads: list[Bytes]
    writes: list[Bytes]


class Flight(NamedTuple):
    """A collective that was started: its name, the line that started it, what it accesses, and the tensors, kept."""

    name: str
    site: str
    access: Access
    tensors: list[Tensor]


class Collectives(TorchDispatchMode):
    """The check, for the time of a `with` statement, in the thread that enters it. RaceError at the first race.

    At the end RaceError for collectives that were not waited for, except while another error is on its way, and except
    those whose call sites end with one of `may_be_left`.
    """

    def __init__(self, *, may_be_left: Sequence[str] = ()) -> None:
        super().__init__()
        self.num_started, self._may_be_left = 0, may_be_left
        self._flights: dict[int, tuple[dist.Work, list[Flight]]] = {}  # by id of the Work, which is kept
        self._here = threading.local()  # .started: collectives that have no Work yet
        self._patches = ExitStack()

    def __enter__(self) -> "Collectives":
        patch = self._patches.enter_context(pytest.MonkeyPatch.context())
        for name in ("tolist", "numpy", "__array__"):
            patch.setattr(Tensor, name, self._host_reads(getattr(Tensor, name), name))
        patch.setattr(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        for name in STARTERS:
            patch.setattr(dist.ProcessGroup, name, self._starting(getattr(dist.ProcessGroup, name)))
        patch.setattr(dist.Work, "wait", self._waiting(dist.Work.wait))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()
        if kind is None:
            self.assert_all_waited_for()

    def assert_all_waited_for(self) -> None:
        """RaceError with the lines that started what is still under way."""
        left = [flight for flight in self._under_way() if not flight.site.endswith(tuple(self._may_be_left))]
        if left:
            sites = "\n".join(sorted({f"  {flight.name} started at {flight.site}" for flight in left}))
            raise RaceError(f"{len(left)} collectives were never waited for:\n{sites}")

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operators on its local tensors, which come here again
        kwargs = kwargs or {}
        is_collective = func.namespace == "c10d"
        if self._flights or is_collective:
            tensors, access = accessed(func, args, kwargs)
            self._check(access, func.name())
            if is_collective and func.name() not in NO_ACCESS:
                self.num_started += 1
                flight = Flight(func.name(), call_site(), access, tensors)
                self._here.started = [*getattr(self._here, "started", ()), flight]
        return func(*args, **kwargs)

    def _under_way(self) -> Iterator[Flight]:
        for _, flights in self._flights.values():
            yield from flights

    def _check(self, access: Access, name: str) -> None:
        for flight in self._under_way():
            if meet(access.writes, flight.access.writes):
                raise RaceError(_sentence(name, "writes", flight, "writes"))
            if meet(access.reads, flight.access.writes):
                raise RaceError(_sentence(name, "reads", flight, "writes"))
            if meet(access.writes, flight.access.reads):
                raise RaceError(_sentence(name, "writes", flight, "reads"))

    def _starting(self, start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        """A method of ProcessGroup, after which what it has started is under way."""

        @wraps(start)
        def started(*args: Any, **kwargs: Any) -> dist.Work:
            work = start(*args, **kwargs)
            if flights := getattr(self._here, "started", None):
                self._flights[id(work)] = (work, flights)
                self._here.started = []
            return work

        return started

    def _waiting(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(wait)
        def waited(work: dist.Work, *args: Any) -> bool:
            # First: gloo's own wait may copy the result to where it belongs.
            self._flights.pop(id(work), None)
            return wait(work, *args)

        return waited

    def _host_reads(self, read: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(read)
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._flights and not isinstance(tensor, DTensor):
                self._check(Access(intervals([tensor]), []), name)
            return read(tensor, *args, **kwargs)

        return reading

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if self._flights:
                whole = Bytes(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
                self._check(Access([], [whole] if storage.nbytes() else []), "resize_ of its storage")
            return resize(storage, size)

        return resized


# Methods of torch's ProcessGroup that start a collective and return its Work; names differ between versions of torch.
STARTERS = [
    name
    for name in dir(dist.ProcessGroup)
    if name.strip("_").startswith(("all", "broadcast", "reduce", "gather", "scatter", "send", "recv"))
]
NO_ACCESS = {"c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}


def accessed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Access]:
    """Tensors of an operator's arguments that it reads or writes, and their bytes."""
    ways = ways_of(func)
    read, written = list[Tensor](), list[Tensor]()
    for position, value in enumerate(args):
        _take(value, ways.by_position[position], read, written)
    for name, value in kwargs.items():
        _take(value, ways.by_name[name], read, written)
    reads, writes = intervals(read), intervals(written)
    if func.name() == "c10d::_allgather_base_":
        # In place, with this rank's piece where it belongs already, the other pieces alone are written.
        writes = [rest for whole in writes for rest in whole.without(reads[0])] if reads else writes
    return [*read, *written], Access(reads, writes)


def _take(value: Any, way: str, read: list[Tensor], written: list[Tensor]) -> None:
    if not way or value is None or isinstance(value, int | float | str):
        return
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if "r" in way:
        read += tensors
    if "w" in way:
        written += tensors


class Ways(NamedTuple):
    """How an operator uses each argument: any of r(eads) and w(rites)."""

    by_position: list[str]
    by_name: dict[str, str]


@cache
def ways_of(func: Any) -> Ways:
    """Ways of an operator, by its schema; of a collective, whose schema says nothing, by the names of its arguments."""
    arguments, name = func._schema.arguments, func._schema.name.partition("::")[2]
    if func.namespace == "c10d":
        ways = [_way_in_collective(name, argument.name) for argument in arguments]
    else:
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        is_view = not any(writes) and any(found.alias_info is not None for found in func._schema.returns)
        reads = not is_view and name not in ("detach", "alias", "lift_fresh") and not name.startswith(SHAPES_ALONE)
        # What is an `out=` is written alone; what is changed in place is read, too, which adds nothing.
        ways = ["w" if write else "r" if reads else "" for write in writes]
    return Ways(ways, {argument.name: way for argument, way in zip(arguments, ways, strict=True)})


def _way_in_collective(name: str, argument: str) -> str:
    if name in ("barrier", "monitored_barrier_", "check_for_nan"):
        return ""
    if argument.startswith("output") or name.startswith("recv"):
        return "w"
    if argument.startswith("input") or name == "send":
        return "r"
    return "w" if argument.startswith("tensor") else ""


def intervals(tensors: Iterable[Tensor]) -> list[Bytes]:
    """Bytes of each tensor, from the first to the last."""
    found = []
    for tensor in tensors:
        if tensor.numel() and tensor.untyped_storage().nbytes():
            first = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append(Bytes(first, first + (last + 1) * tensor.element_size()))
    return found


def meet(some: list[Bytes], others: list[Bytes]) -> bool:
    """Whether an interval of each list share a byte."""
    return any(one.meets(other) for one in some for other in others)


def call_site() -> str:
    """Line of the package that called, as `layers/linear.py:202 in forward`; else the nearest outside of torch."""
    frame: FrameType | None = sys._getframe(1)
    nearest = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.endswith(TRANSPARENT):
            return f"{path.removeprefix(PACKAGE)[1:]}:{frame.f_lineno} in {frame.f_code.co_name}"
        if nearest is None and "/torch/" not in path and path != __file__ and not path.endswith(TRANSPARENT):
            nearest = f"{path.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return nearest or "an unknown place"


def _sentence(name: str, does: str, flight: Flight, is_doing: str) -> str:
    return f"{name} at {call_site()} {does} what {flight.name}, started at {flight.site} and not waited for, {is_doing}"


# The last step gathers parameters for a forward that does not come.
LEFT_AT_THE_END = (" in gather",)


def under_the_check(place: Place, function: Callable[..., Any], *args: Any) -> Any:
    """`function(place, *args)` under the check, for `run_ranks` to call in its place."""
    with Collectives(may_be_left=LEFT_AT_THE_END):
        return function(place, *args)
