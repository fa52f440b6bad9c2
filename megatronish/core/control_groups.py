"""Control groups of Linux: how much memory a process may take before a limit of its container, or of its job."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # in memory.stat: pages of files, which the system drops when it needs memory


VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def bytes_within_limits(groups: Path = GROUPS, of_process: Path = OWN) -> float:
    """Bytes that this process may take before the first limit of its groups; infinity without one."""
    rooms = [math.inf]
    for group, files in _groups(groups, of_process):
        with suppress(OSError, ValueError):  # "max" is no number, and the root has no files
            limit, usage = (int((group / name).read_text()) for name in (files.limit, files.usage))
            words = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            rooms.append(limit - usage + sum(int(value) for name, value in words if name == files.reclaimable))
    return max(min(rooms), 0)


def _groups(groups: Path, of_process: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's groups and of those around them. In a container the root is its own group."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (groups / "memory", VERSION_1) if controllers else (groups, VERSION_2)
        group = root / name.lstrip("/")
        while group != root:
            yield group, files
            group = group.parent
        yield root, files
