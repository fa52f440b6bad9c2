"""Measurement of collectives over an axis of the mesh: seconds of many runs, on all of the axis's groups at once.

Every run begins with a barrier of all ranks, and its time is that of the slowest rank. All groups of an axis run at the
same time, as they do in training: groups that share a link show it.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatronish.core.errors import RunError
from megatronish.estimate.links.definitions import HCCL, bus_factor, num_elements, uneven
from megatronish.estimate.links.fit import LARGEST_SPREAD, LinkFit, SizeTimes, fits_of
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

# Collectives to be measured, each with buffers of its own and a check of its result on every rank.


TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MeasuredOperation(NamedTuple):
    """A collective of `num_bytes`: `run` it, once after the other. After the first run `result` is `expected()`.

    `result` is None on a rank that receives nothing.
    """

    num_bytes: int
    run: Callable[[], object]
    result: Tensor | None
    expected: Callable[[], Tensor]

    def is_right(self) -> bool:
        """Whether the first run has brought what it must."""
        return self.result is None or torch.equal(self.result, self.expected())


class Buffers(NamedTuple):
    """What buffers are made of: S has `length` elements, a part `length / size` of them."""

    axis: Axis
    length: int
    dtype: torch.dtype
    device: torch.device

    @property
    def part(self) -> int:
        """Elements of one of `size` equal parts."""
        return self.length // self.axis.size

    def empty(self, count: int) -> Tensor:
        """[count] of no value that a check expects."""
        return torch.full((count,), -1.0, dtype=self.dtype, device=self.device)

    def values(self, number: int, count: int) -> Tensor:
        """[count] of whole numbers below 251, which every dtype holds: the message of this number."""
        return ((torch.arange(count, device=self.device) + 31 * number) % 251).to(self.dtype)

    def terms(self, rank: int) -> Tensor:
        """[S]: this rank's terms of a sum, ones and zeros."""
        return ((torch.arange(self.length, device=self.device) + rank) % 4 == 0).to(self.dtype)

    def sums(self, first: int, count: int) -> Tensor:
        """[count]: elements of the sum over the axis from `first` on."""
        ranks = torch.arange(self.axis.size, device=self.device)
        by_place = torch.stack([((ranks + place) % 4 == 0).sum() for place in range(4)])
        return by_place[(torch.arange(count, device=self.device) + first) % 4].to(self.dtype)

    def joined(self, numbers: Iterable[int]) -> Tensor:
        """Messages of these numbers, a part each, behind each other."""
        return torch.cat([self.values(number, self.part) for number in numbers])


def operation(collective: str, num_bytes: int, *, axis: Axis, dtype: str, device: torch.device) -> MeasuredOperation:
    """A collective over `axis`, of S bytes as definitions.py counts them, or of a few less."""
    count = num_elements(collective, num_bytes, dtype=dtype, num_ranks=axis.size)
    kind = TORCH_DTYPES[dtype]
    made = _MAKERS[collective](Buffers(axis, count, kind, device))
    return made._replace(num_bytes=count * kind.itemsize)


def _all_reduce(of: Buffers) -> MeasuredOperation:
    x = of.terms(of.axis.rank)
    return MeasuredOperation(0, lambda: comm.all_reduce(x, of.axis), x, lambda: of.sums(0, of.length))


def _all_gather(of: Buffers) -> MeasuredOperation:
    x, whole = of.values(of.axis.rank, of.part), of.empty(of.length)
    run = partial(_finished, comm.start_all_gather, x, of.axis, into=whole)
    return MeasuredOperation(0, run, whole, lambda: of.joined(range(of.axis.size)))


def _reduce_scatter(of: Buffers) -> MeasuredOperation:
    x, part = of.terms(of.axis.rank), of.empty(of.part)
    run = partial(_finished, comm.start_reduce_scatter, x, of.axis, into=part)
    return MeasuredOperation(0, run, part, lambda: of.sums(of.axis.rank * of.part, of.part))


def _finished(start: Callable[..., comm.Pending], *args: Any, **options: Any) -> Tensor:
    return start(*args, **options).wait()


def _broadcast(of: Buffers) -> MeasuredOperation:
    x = of.values(0, of.length) if of.axis.is_first else of.empty(of.length)
    run = partial(dist.broadcast, x, of.axis.ranks[0], group=of.axis.group)
    return MeasuredOperation(0, run, x, lambda: of.values(0, of.length))


def _reduce(of: Buffers) -> MeasuredOperation:
    x = of.terms(of.axis.rank)
    run = partial(dist.reduce, x, of.axis.ranks[0], group=of.axis.group)
    return MeasuredOperation(0, run, x if of.axis.is_first else None, lambda: of.sums(0, of.length))


def _scatter(of: Buffers) -> MeasuredOperation:
    part, rank = of.empty(of.part), of.axis.rank
    parts = list(of.joined(range(of.axis.size)).split(of.part)) if of.axis.is_first else None
    run = partial(dist.scatter, part, parts, of.axis.ranks[0], group=of.axis.group)
    return MeasuredOperation(0, run, part, lambda: of.values(rank, of.part))


def _gather(of: Buffers) -> MeasuredOperation:
    x, whole = of.values(of.axis.rank, of.part), of.empty(of.length if of.axis.is_first else 0)
    parts = list(whole.split(of.part)) if of.axis.is_first else None
    run = partial(dist.gather, x, parts, of.axis.ranks[0], group=of.axis.group)
    return MeasuredOperation(0, run, whole if of.axis.is_first else None, lambda: of.joined(range(of.axis.size)))


def _all_to_all(of: Buffers) -> MeasuredOperation:
    size, rank = of.axis.size, of.axis.rank
    x, arriving = of.joined(rank * size + to for to in range(size)), of.empty(of.length)
    run = partial(dist.all_to_all_single, arriving, x, group=of.axis.group)
    return MeasuredOperation(0, run, arriving, lambda: of.joined(source * size + rank for source in range(size)))


def _all_to_all_v(of: Buffers) -> MeasuredOperation:
    size, rank, rows = of.axis.size, of.axis.rank, uneven(of.axis.size)
    unit = of.length // max(map(sum, rows))
    sent, received = ([unit * parts for parts in line] for line in (rows[rank], [row[rank] for row in rows]))

    def messages(numbers: Iterable[int], lengths: Sequence[int]) -> Tensor:
        return torch.cat([of.values(number, length) for number, length in zip(numbers, lengths, strict=True)])

    x, arriving = messages((rank * size + to for to in range(size)), sent), of.empty(sum(received))
    run = partial(dist.all_to_all_single, arriving, x, received, sent, group=of.axis.group)
    return MeasuredOperation(
        0, run, arriving, lambda: messages((source * size + rank for source in range(size)), received)
    )


def _send_recv(of: Buffers) -> MeasuredOperation:
    axis = of.axis
    x, arriving = of.values(axis.rank, of.length), of.empty(of.length)
    after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))

    def run() -> None:
        transfers = [
            dist.P2POp(dist.isend, x, after, axis.group),
            dist.P2POp(dist.irecv, arriving, before, axis.group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    return MeasuredOperation(0, run, arriving, lambda: of.values((axis.rank - 1) % axis.size, of.length))


_MAKERS: dict[str, Callable[[Buffers], MeasuredOperation]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "send_recv": _send_recv,
}


ATTEMPTS = 3  # at a size whose runs differ by more than a fit may have


class Runs(NamedTuple):
    """What is measured of each size: elements of `dtype` on `device`, runs before and during the measurement."""

    dtype: str
    device: torch.device
    num_warmups: int
    num_runs: int


@dataclass(frozen=True)
class LinkTimes:
    """A row of results: a collective of one size over one axis. algbw and busbw are bytes a second of the median."""

    collective: str
    hccl: str
    dtype: str
    bytes: int
    ranks: int
    nodes: int
    axis: str
    device: str
    seconds_min: float
    seconds_median: float
    seconds_max: float
    algbw: float
    busbw: float
    checked: bool

    def as_json(self) -> dict[str, Any]:
        """Object of a JSON line."""
        return asdict(self)


def measure(collective: str, num_bytes: int, *, axis: Axis, world: Axis, num_nodes: int, runs: Runs) -> LinkTimes:
    """Measure one collective of one size. Every rank of `world` calls it, each with its own group of the axis.

    Where the runs differ too much for a fit they are repeated; the attempt that differs least counts. RunError if the
    backend has no such collective.
    """
    try:
        made = operation(collective, num_bytes, axis=axis, dtype=runs.dtype, device=runs.device)
        made.run()
    except (RuntimeError, NotImplementedError) as error:
        raise RunError(f"{collective} over {axis.name} failed: {str(error).splitlines()[0]}") from error
    is_wrong = torch.tensor(float(not made.is_right()), device=runs.device)
    wrong = float(comm.all_reduce(is_wrong, world, "max"))
    for _ in range(runs.num_warmups):
        made.run()
    attempts = [_slowest(_seconds(made.run, world, runs), world, runs.device)]
    while _spread(attempts[-1]) > LARGEST_SPREAD and len(attempts) < ATTEMPTS:
        attempts.append(_slowest(_seconds(made.run, world, runs), world, runs.device))
    seconds = min(attempts, key=_spread)
    median = statistics.median(seconds)
    algbw = made.num_bytes / median
    return LinkTimes(
        collective=collective,
        hccl=HCCL[collective],
        dtype=runs.dtype,
        bytes=made.num_bytes,
        ranks=axis.size,
        nodes=num_nodes,
        axis=axis.name,
        device=torch.cuda.get_device_name(runs.device) if runs.device.type == "cuda" else "cpu",
        seconds_min=min(seconds),
        seconds_median=median,
        seconds_max=max(seconds),
        algbw=algbw,
        busbw=algbw * bus_factor(collective, axis.size),
        checked=not wrong,
    )


def _spread(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds)


def _seconds(run: Callable[[], object], world: Axis, runs: Runs) -> Iterator[float]:
    """This rank's seconds of each run."""
    for _ in range(runs.num_runs):
        comm.barrier(world, runs.device)
        begin = time.perf_counter()
        run()
        if runs.device.type == "cuda":
            torch.cuda.synchronize(runs.device)
        yield time.perf_counter() - begin


def _slowest(seconds: Iterator[float], world: Axis, device: torch.device) -> list[float]:
    """Each run's seconds on the slowest rank of all."""
    values: list[float] = comm.all_reduce(
        torch.tensor(list(seconds), dtype=torch.float64).to(device), world, "max"
    ).tolist()
    return values


def fits(rows: Sequence[LinkTimes]) -> Iterator[tuple[LinkTimes, LinkFit]]:
    """Fits of the rows of each collective and axis, each with the first of its rows, for the names."""
    groups: dict[tuple[str, str], list[LinkTimes]] = {}
    for row in rows:
        groups.setdefault((row.axis, row.collective), []).append(row)
    for group in groups.values():
        sizes = {row.bytes: SizeTimes(row.bytes, row.seconds_min, row.seconds_max) for row in group}
        for fit in fits_of(list(sizes.values())):
            yield group[0], fit
