"""Comparison of all ranks before a run: a table, and a sentence for each problem.

Facts are compared first, before a process group of the layout is made: ranks that disagree about the layout would wait
for each other there. Then come clocks, links and speed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.links.axes import open_axes
from megatronish.estimate.links.facts import PREFIXES, Facts, Free, Needs, differing, lacking, machine_facts, ranks_text
from megatronish.estimate.links.settings import groups_of
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Axis, Mesh

# Short measurements of every rank before a run: its clock, its links to its neighbours, the speed of its device.


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
    # One peer at a time: rank 0 would measure its own queue if several replies came at once.
    for peer in range(1, axis.size):
        if axis.rank == peer:
            for _ in range(PING_PONGS):
                _receive(message, axis, source=0)
                _send(message.fill_(clock()), axis, to=0)
            # After the ping-pongs rank 0 sends back what it has found, so that every rank knows its own offset for
            # `from_all`.
            _receive(message, axis, source=0)
            mine = float(message)
        elif axis.rank == 0:
            tries = []
            for _ in range(PING_PONGS):
                begin = clock()
                _send(message, axis, to=peer)
                _receive(message, axis, source=peer)
                end = clock()
                # Round trip first, so that `min` takes the quickest. Halfway through it the peer read its clock, give
                # or take the asymmetry of the two ways.
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
    # All ranks get all links, so they decide alike whether to measure again: a rank that stopped alone would leave its
    # neighbours waiting.
    for _ in range(ATTEMPTS):
        mine = [link for name, axis in axes.items() for link in _links_of(name, axis, device)]
        for link in (link for links in from_all(everyone, lambda own=mine: own) for link in links):  # type: ignore[misc]
            best[link[:3]] = max(link, best.get(link[:3], link), key=lambda each: each.bandwidth)
        if not slow_links(list(best.values())):
            break
    return sorted(best.values())


def slow_links(links: Sequence[Link]) -> list[tuple[Link, float]]:
    """Links below a third of the median of their axis, each with that median; of two links it is the quicker one."""
    slow = []
    for name in dict.fromkeys(link.axis for link in links):
        of_axis = [link for link in links if link.axis == name]
        median = statistics.median_high(link.bandwidth for link in of_axis)
        slow += [(link, median) for link in of_axis if link.bandwidth < SLOWEST_LINK * median]
    return slow


def _links_of(name: str, axis: Axis, device: torch.device) -> Iterator[Link]:
    """The links that begin at this rank. Links without a common rank are measured at the same time."""
    message = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    # A ring; of two ranks both edges are the same link. Three phases without a common rank in any: even edges, odd
    # ones, and the one that closes the ring, whose ends both have another edge.
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
        # Bytes go there and back; the first round trip also made the connection.
        if axis.rank == first:
            bandwidth = 2 * LINK_BYTES / min(seconds[1:])
            yield Link(name, axis.ranks[first], axis.ranks[second], bandwidth)


def _phase(edge: tuple[int, int]) -> int:
    return 2 if edge[1] < edge[0] else edge[0] % 2


def measured_products(everyone: Axis, device: torch.device) -> list[float]:
    """Shortest seconds of a fixed matrix product on each rank, all ranks at the same time."""
    best: list[float] | None = None
    for _ in range(ATTEMPTS):
        # At the same time on all ranks: those of one machine share its power and memory in training, too.
        seconds = from_all(everyone, lambda: product_seconds(device))
        best = seconds if best is None else [min(pair) for pair in zip(best, seconds, strict=True)]
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


GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"
DECIDES = "config "  # facts of that name decide about process groups


@dataclass(frozen=True)
class Subject:
    """What is compared, on one rank: more facts than those of the machine, the layout, the save folder and needs."""

    facts: Facts
    layout: Layout
    experts: ExpertLayout
    folder: Path
    needs: Needs


@dataclass
class Findings:
    """Lines of the table (name, text, whether it is well) and sentences of what is not."""

    lines: list[tuple[str, str, bool]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, text: str, problems: Sequence[str] = ()) -> None:
        """A line, and what is wrong with it."""
        self.lines.append((name, text, not problems))
        self.problems.extend(problems)

    def text(self, *, coloured: bool) -> str:
        """The table and the sentences."""
        green, red, plain = (GREEN, RED, PLAIN) if coloured else ("", "", "")
        rows = [
            f"  {green if is_well else red}{'ok' if is_well else 'PROBLEM':<8}{plain} {name:<12} {text}"
            for name, text, is_well in self.lines
        ]
        ending = [f"{red}problem:{plain} {problem}" for problem in self.problems]
        return "\n".join([*rows, *(ending or [f"{green}all ranks are ready{plain}"])])


def preflight(subject: Subject, mesh: Mesh, *, backend: str) -> int:
    """Compare the ranks of `mesh`, which has no axis but the world; rank 0 prints. The status: 1 if one is not well."""
    # 1. Facts. The group of the world is all there is: its size is the launcher's, so even ranks of different configs
    # have it.
    begin = time.perf_counter()
    findings = Findings()
    free = Free.of(subject.folder, mesh.device)
    everyone = from_all(mesh.checkpoint_axis, lambda: (machine_facts() | subject.facts, free))
    of_ranks, free_of_ranks = [facts for facts, _ in everyone], [each for _, each in everyone]
    hosts = [each.host for each in free_of_ranks]
    different = differing(of_ranks)
    _compare(findings, of_ranks[0], different)
    _resources(findings, free_of_ranks, subject)
    # 2. Clocks, which need nothing of the layout.
    offsets = clock_offsets(mesh.checkpoint_axis)
    clock = clock_problem(offsets, hosts)
    findings.add("clocks", f"at most {max(map(abs, offsets)):.3g} s from rank 0's", [clock] if clock else [])
    # 3. Links and speed, over the groups of the layout. `different` is the same on all ranks, so all of them make
    # groups, or none does.
    if any(name.startswith(DECIDES) for name in different):
        findings.add("links", "not measured: the ranks first need one config")
    else:
        _measure(findings, subject, mesh, backend, hosts)
    if mesh.is_main:
        machines = f"{len(set(hosts))} machine{'s' if len(set(hosts)) > 1 else ''}"
        print(f"preflight of {mesh.world.size} ranks on {machines}, {time.perf_counter() - begin:.1f} s:")
        print(findings.text(coloured=sys.stdout.isatty()), flush=True)
    comm.barrier(mesh.world, mesh.device)  # rank 0 has spoken: a launcher ends the others once one has ended with 1
    return 1 if findings.problems else 0


def _compare(findings: Findings, facts: Facts, different: dict[str, str]) -> None:
    """Lines of the facts: each version for itself, variables, config and others each as one."""
    # Names say how a fact is shown: "torch" is a line of its own, PREFIX_NAME an environment variable, "config NAME"
    # one of a kind.
    for name, value in facts.items():
        if " " not in name and not name.startswith(PREFIXES):
            findings.add(name, value, [different[name]] if name in different else [])
    names = [*facts, *(name for name in different if name not in facts)]
    variables = [name for name in names if name.startswith(PREFIXES)]
    problems = [different[name] for name in variables if name in different]
    findings.add("variables", f"{len(variables)} of {', '.join(f'{prefix}*' for prefix in PREFIXES)}", problems)
    for kind in dict.fromkeys(name.partition(" ")[0] for name in names if " " in name):
        of_kind = [name for name in names if name.startswith(f"{kind} ")]
        problems = [different[name] for name in of_kind if name in different]
        findings.add(kind, f"{len(of_kind)} values", problems)


def _resources(findings: Findings, free: Sequence[Free], subject: Subject) -> None:
    """Lines of disk and memory: the rank that has least."""
    problems = lacking(free, subject.needs, subject.folder)
    sentences = [[problems[name]] if name in problems else [] for name in ("disk", "memory")]
    need = f"; a checkpoint takes {format_bytes(subject.needs.disk)}" if subject.needs.disk else ""
    findings.add("disk", f"{_least([each.disk for each in free])} free in {subject.folder}{need}", sentences[0])
    memory = f"{_least([each.memory for each in free])} free on hosts"
    on_devices = [each.device for each in free if each.device is not None]
    if on_devices:
        memory += f", {_least(on_devices)} on devices"
    if subject.needs.memory:
        memory += f"; a rank needs about {format_bytes(subject.needs.memory)}"
    findings.add("memory", memory, sentences[1])


def _least(amounts: Sequence[int]) -> str:
    least = min(amounts)
    return f"{format_bytes(least)} (rank {amounts.index(least)} has least)"


def _measure(findings: Findings, subject: Subject, mesh: Mesh, backend: str, hosts: Sequence[str]) -> None:
    """Lines of links and speed."""
    axes = open_axes(mesh, groups_of(subject.layout, subject.experts), backend=backend)
    links = measured_links(axes, mesh.checkpoint_axis, mesh.device)
    for name in axes:
        of_axis = [link for link in links if link.axis == name]
        speeds = [link.bandwidth / 1e9 for link in of_axis]
        number = f"{len(of_axis)} link{'s' if len(of_axis) > 1 else ''}"
        text = f"{number}, {min(speeds):.2f} to {max(speeds):.2f} GB/s"
        findings.add(f"links {name}", text, list(_sentences(of_axis, hosts)))
    seconds = measured_products(mesh.checkpoint_axis, mesh.device)
    # The lower median, as in `slow_ranks`, so that the sentence has the number that was compared.
    typical = sorted(seconds)[(len(seconds) - 1) // 2]
    problems = [
        f"rank {rank} on {hosts[rank]} is slow: a fixed matrix product takes {1e3 * seconds[rank]:.2f} ms, "
        f"{seconds[rank] / typical:.1f} times the typical {1e3 * typical:.2f} ms"
        for rank in slow_ranks(seconds)
    ]
    findings.add("speed", f"a matrix product takes {1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} ms", problems)


def _sentences(links: Sequence[Link], hosts: Sequence[str]) -> Iterator[str]:
    for link, median in slow_links(links):
        yield (
            f"the link of rank {link.first} on {hosts[link.first]} to rank {link.second} on {hosts[link.second]} "
            f"({link.axis}) carries {link.bandwidth / 1e9:.3f} GB/s, below a third of the median of {median / 1e9:.3f}"
        )
