"""Measurement of collectives over an axis of the mesh: seconds of many runs, on all of the axis's groups at once.

Every run begins with a barrier of all ranks, and its time is that of the slowest rank. All groups of an axis run at the
same time, as they do in training: groups that share a link show it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from megatronish.core.errors import RunError
from megatronish.estimate.links.definitions import HCCL, bus_factor
from megatronish.estimate.links.fit import LARGEST_SPREAD, LinkFit, SizeTimes, fits_of
from megatronish.estimate.links.operations import operation
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

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
