"""Facts of a rank that must be equal on all ranks of a run, and what the rank has free: compared before the first step.

A fact is a name and a text. Facts that differ get a sentence with every value and the ranks that have it.
"""

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatronish import __version__
from megatronish.core.control_groups import bytes_within_limits
from megatronish.estimate.costs.memory_table import format_bytes

PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
MOST_VALUES = 3  # of a fact, that a sentence tells
UNREADABLE = "unreadable"  # how the text of a fact begins that is a problem even if it is equal on all ranks
LEAST_DISK = 10**9  # bytes, where nothing is known of the checkpoints

Facts = dict[str, str]


def machine_facts(environ: Mapping[str, str] = os.environ) -> Facts:
    """Versions, and the variables that NCCL, gloo and torch read."""
    facts = {"torch": torch.__version__, "Python": platform.python_version(), "megatronish": __version__}
    if torch.cuda.is_available():
        facts |= {"CUDA": str(torch.version.cuda), "GPU": torch.cuda.get_device_name()}
    return facts | {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIXES)}


def nested_facts(values: Mapping[str, Any], name: str) -> Facts:
    """Facts of a mapping of mappings: `NAME section.field` for each value."""
    facts: Facts = {}
    for key, value in values.items():
        fields = value if isinstance(value, Mapping) else {"": value}
        facts |= {f"{name} {key}.{field}".rstrip("."): json.dumps(each, default=str) for field, each in fields.items()}
    return facts


def differing(of_ranks: Sequence[Facts]) -> dict[str, str]:
    """A sentence for each fact that is not equal on all ranks, or that cannot be read, by its name."""
    names = dict.fromkeys(name for facts in of_ranks for name in facts)
    values = {name: [facts.get(name, "not set") for facts in of_ranks] for name in names}
    return {
        name: _sentence(name, each)
        for name, each in values.items()
        if len(set(each)) > 1 or each[0].startswith(UNREADABLE)
    }


def _sentence(name: str, values: Sequence[str]) -> str:
    holders = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
    parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items()]
    if len(parts) > MOST_VALUES:
        parts = [*parts[:MOST_VALUES], f"{len(parts) - MOST_VALUES} other values elsewhere"]
    return f"{name} is {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    places = count()
    runs = [list(run) for _, run in groupby(ranks, lambda rank: rank - next(places))]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


class Free(NamedTuple):
    """What a rank has free, in bytes: of its host, of its device (None on CPU), and of the disk of a folder."""

    host: str
    disk: int
    memory: int
    device: int | None

    @classmethod
    def of(cls, folder: Path, device: torch.device) -> "Free":
        """What there is now; the folder need not exist yet."""
        folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        disk = os.statvfs(folder)
        on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return cls(socket.gethostname(), disk.f_bavail * disk.f_frsize, available_memory(), on_device)


class Needs(NamedTuple):
    """Bytes that a run needs: of the disk for a checkpoint, of the device (on CPU: of the host) for each rank.

    0: not known.
    """

    disk: int = 0
    memory: int = 0


def available_memory() -> int:
    """Bytes of the host's memory that a process can have without swapping, within the limits of its control groups."""
    available = _of_meminfo("MemAvailable")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(available, bytes_within_limits()))


def free_swap() -> int:
    """Bytes of the host's swap that is not used."""
    return _of_meminfo("SwapFree") or 0


def _of_meminfo(name: str) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines[name].split()[0])
    except (OSError, KeyError, ValueError):  # not Linux
        return None


def lacking(of_ranks: Sequence[Free], needs: Needs, folder: Path) -> dict[str, str]:
    """A sentence for each of disk and memory of which a rank has too little."""
    problems = {}
    least = min(range(len(of_ranks)), key=lambda rank: of_ranks[rank].disk)
    if of_ranks[least].disk < max(needs.disk, LEAST_DISK):
        need = f"a checkpoint takes {format_bytes(needs.disk)}" if needs.disk else "a run writes there"
        problems["disk"] = (
            f"rank {least} on {of_ranks[least].host} has {format_bytes(of_ranks[least].disk)} free in {folder}, and "
            f"{need}; free some, or choose another --save"
        )
    for rank, free in enumerate(of_ranks):
        if free.device is not None and free.device < needs.memory:
            problems.setdefault(
                "memory",
                f"rank {rank} on {free.host} has {format_bytes(free.device)} of its device free, and needs about "
                f"{format_bytes(needs.memory)}; end what else uses the device, or cut the model further",
            )
        peers = sum(other.host == free.host for other in of_ranks)
        if free.device is None and free.memory < peers * needs.memory:
            problems.setdefault(
                "memory",
                f"{free.host} has {format_bytes(free.memory)} of memory free, and its {peers} ranks need about "
                f"{format_bytes(needs.memory)} each; use more machines, or cut the model further",
            )
    return problems
