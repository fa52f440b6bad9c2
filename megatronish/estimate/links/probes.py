"""Short measurements of every rank before a run: its clock, its links to its neighbours, the speed of its device."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatronish.checkpoint.all_or_none import from_all
from megatronish.estimate.links.facts import ranks_text
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

PING_PONGS = 5
LINK_BYTES = 2**20
PRODUCTS = 30
SIDE_ON_CPU, SIDE_ON_GPU = 256, 4096  # of the matrices: about a millisecond
LARGEST_OFFSET = 1.0  # seconds between two clocks
SLOWEST_LINK = 1 / 3  # of the median of its axis
SLOWEST_PRODUCT = 1.5  # times the median
ATTEMPTS = 3  # before a link or a rank is called slow: others use the machine, too


def clock_offsets(axis: Axis, clock: Callable[[], float] = time.time) -> list[float]:
    """Seconds by which each rank's clock is ahead of that of rank 0 of the axis, whose tensors are on the CPU.

    Of five ping-pongs with each rank the quickest counts: the reply was read in the middle of it.
    """
    mine = 0.0
    message = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, axis.size):
        if axis.rank == peer:
            for _ in range(PING_PONGS):
                _receive(message, axis, source=0)
                _send(message.fill_(clock()), axis, to=0)
            _receive(message, axis, source=0)
            mine = float(message)
        elif axis.rank == 0:
            tries = []
            for _ in range(PING_PONGS):
                begin = clock()
                _send(message, axis, to=peer)
                _receive(message, axis, source=peer)
                end = clock()
                tries.append((end - begin, float(message) - (begin + end) / 2))
            _send(message.fill_(min(tries)[1]), axis, to=peer)
    return from_all(axis, lambda: mine)


def clock_problem(offsets: Sequence[float], hosts: Sequence[str]) -> str | None:
    """A sentence about the clock that is furthest from that of rank 0, if it is too far."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    if abs(offsets[worst]) <= LARGEST_OFFSET:
        return None
    way = "ahead of" if offsets[worst] > 0 else "behind"
    far = [rank for rank, offset in enumerate(offsets) if abs(offset) > LARGEST_OFFSET]
    return (
        f"the clock of rank {worst} on {hosts[worst]} is {abs(offsets[worst]):.1f} s {way} that of rank 0 on {hosts[0]}"
        + (f", and in all those of {ranks_text(far)} are off" if len(far) > 1 else "")
        + "; let NTP or chrony set the clocks"
    )


class Link(NamedTuple):
    """A link between neighbours of an axis, by their global ranks, and its bytes a second each way."""

    axis: str
    first: int
    second: int
    bandwidth: float


def measured_links(axes: Mapping[str, Axis], everyone: Axis, device: torch.device) -> list[Link]:
    """Every link between neighbours on every axis: of five ping-pongs of 1 MiB the quickest counts."""
    best: dict[tuple[str, int, int], Link] = {}
    for _ in range(ATTEMPTS):
        mine = [link for name, axis in axes.items() for link in _links_of(name, axis, device)]
        for link in (link for links in from_all(everyone, lambda found=mine: found) for link in links):  # type: ignore[misc]
            best[link[:3]] = max(link, best.get(link[:3], link), key=lambda each: each.bandwidth)
        if not slow_links(list(best.values())):
            break
    return sorted(best.values())


def slow_links(links: Sequence[Link]) -> list[tuple[Link, float]]:
    """Links below a third of the median of their axis, each with that median; of two links it is the quicker one."""
    found = []
    for name in dict.fromkeys(link.axis for link in links):
        of_axis = [link for link in links if link.axis == name]
        median = statistics.median_high(link.bandwidth for link in of_axis)
        found += [(link, median) for link in of_axis if link.bandwidth < SLOWEST_LINK * median]
    return found


def _links_of(name: str, axis: Axis, device: torch.device) -> Iterator[Link]:
    """The links that begin at this rank. Links without a common rank are measured at the same time."""
    message = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    edges = [(rank, (rank + 1) % axis.size) for rank in range(axis.size if axis.size > 2 else 1)]
    for first, second in [edge for phase in (0, 1, 2) for edge in edges if _phase(edge) == phase]:
        if axis.rank not in (first, second):
            continue
        seconds = []
        for _ in range(PING_PONGS + 1):  # the first connects
            begin = time.perf_counter()
            if axis.rank == first:
                _send(message, axis, to=second)
                _receive(message, axis, source=second)
            else:
                _receive(message, axis, source=first)
                _send(message, axis, to=first)
            _synchronize(device)
            seconds.append(time.perf_counter() - begin)
        if axis.rank == first:
            bandwidth = 2 * LINK_BYTES / min(seconds[1:])
            yield Link(name, axis.ranks[first], axis.ranks[second], bandwidth)


def _phase(edge: tuple[int, int]) -> int:
    return 2 if edge[1] < edge[0] else edge[0] % 2


def measured_products(everyone: Axis, device: torch.device) -> list[float]:
    """Shortest seconds of a fixed matrix product on each rank, all ranks at the same time."""
    best: list[float] | None = None
    for _ in range(ATTEMPTS):
        found = from_all(everyone, lambda: product_seconds(device))
        best = found if best is None else [min(pair) for pair in zip(best, found, strict=True)]
        if not slow_ranks(best):
            break
    assert best is not None
    return best


def product_seconds(device: torch.device) -> float:
    """Shortest seconds of thirty products."""
    side = SIDE_ON_GPU if device.type == "cuda" else SIDE_ON_CPU
    x = torch.ones(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    seconds = []
    for _ in range(PRODUCTS):
        begin = time.perf_counter()
        torch.matmul(x, x)
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Ranks that take 1.5 times the median; of two ranks it is the quicker one."""
    limit = SLOWEST_PRODUCT * statistics.median_low(seconds)
    return [rank for rank, each in enumerate(seconds) if each > limit]


def _send(message: torch.Tensor, axis: Axis, *, to: int) -> None:
    comm.start_send(message, axis, to=to, tag=0).wait()


def _receive(message: torch.Tensor, axis: Axis, *, source: int) -> None:
    comm.start_receive(message, axis, source=source, tag=0).wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
