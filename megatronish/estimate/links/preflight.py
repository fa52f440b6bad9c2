"""Comparison of all ranks before a run: a table, and a sentence for each problem.

Facts are compared first, before a process group of the layout is made: ranks that disagree about the layout would wait
for each other there. Then come clocks, links and speed.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatronish.checkpoint.all_or_none import from_all
from megatronish.core.layout import ExpertLayout, Layout
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.links.axes import open_axes
from megatronish.estimate.links.facts import PREFIXES, Facts, Free, Needs, differing, lacking, machine_facts
from megatronish.estimate.links.probes import (
    Link,
    clock_offsets,
    clock_problem,
    measured_links,
    measured_products,
    slow_links,
    slow_ranks,
)
from megatronish.estimate.links.settings import groups_of
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh

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
    begin = time.perf_counter()
    findings = Findings()
    free = Free.of(subject.folder, mesh.device)
    everyone = from_all(mesh.checkpoint_axis, lambda: (machine_facts() | subject.facts, free))
    of_ranks, free_of_ranks = [facts for facts, _ in everyone], [each for _, each in everyone]
    hosts = [each.host for each in free_of_ranks]
    different = differing(of_ranks)
    _compare(findings, of_ranks[0], different)
    _resources(findings, free_of_ranks, subject)
    offsets = clock_offsets(mesh.checkpoint_axis)
    clock = clock_problem(offsets, hosts)
    findings.add("clocks", f"at most {max(map(abs, offsets)):.3g} s from rank 0's", [clock] if clock else [])
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
    for name, value in facts.items():
        if " " not in name and not name.startswith(PREFIXES):
            findings.add(name, value, [different[name]] if name in different else [])
    names = [*facts, *(name for name in different if name not in facts)]
    variables = [name for name in names if name.startswith(PREFIXES)]
    told = [different[name] for name in variables if name in different]
    findings.add("variables", f"{len(variables)} of {', '.join(f'{prefix}*' for prefix in PREFIXES)}", told)
    for kind in dict.fromkeys(name.partition(" ")[0] for name in names if " " in name):
        of_kind = [name for name in names if name.startswith(f"{kind} ")]
        told = [different[name] for name in of_kind if name in different]
        findings.add(kind, f"{len(of_kind)} values", told)


def _resources(findings: Findings, free: Sequence[Free], subject: Subject) -> None:
    """Lines of disk and memory: the rank that has least."""
    problems = lacking(free, subject.needs, subject.folder)
    told = [[problems[name]] if name in problems else [] for name in ("disk", "memory")]
    need = f"; a checkpoint takes {format_bytes(subject.needs.disk)}" if subject.needs.disk else ""
    findings.add("disk", f"{_least([each.disk for each in free])} free in {subject.folder}{need}", told[0])
    memory = f"{_least([each.memory for each in free])} free on hosts"
    on_devices = [each.device for each in free if each.device is not None]
    if on_devices:
        memory += f", {_least(on_devices)} on devices"
    if subject.needs.memory:
        memory += f"; a rank needs about {format_bytes(subject.needs.memory)}"
    findings.add("memory", memory, told[1])


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
    typical = sorted(seconds)[(len(seconds) - 1) // 2]
    told = [
        f"rank {rank} on {hosts[rank]} is slow: a fixed matrix product takes {1e3 * seconds[rank]:.2f} ms, "
        f"{seconds[rank] / typical:.1f} times the typical {1e3 * typical:.2f} ms"
        for rank in slow_ranks(seconds)
    ]
    findings.add("speed", f"a matrix product takes {1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} ms", told)


def _sentences(links: Sequence[Link], hosts: Sequence[str]) -> Iterator[str]:
    for link, median in slow_links(links):
        yield (
            f"the link of rank {link.first} on {hosts[link.first]} to rank {link.second} on {hosts[link.second]} "
            f"({link.axis}) carries {link.bandwidth / 1e9:.3f} GB/s, below a third of the median of {median / 1e9:.3f}"
        )
