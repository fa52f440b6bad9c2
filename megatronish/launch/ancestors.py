"""Ancestors of this process: which of them is the launcher that started the ranks of this machine."""

import os
import sys
from pathlib import Path


def starter(name: str, value: str) -> int:
    """Process id of the launcher, which is the same for all ranks that it started on this machine.

    It is the nearest ancestor without `name`=`value` in its environment. A rank's parent need not be the launcher:
    `mpirun sh wrapper.sh` puts a shell between, which has the variable. Outside of Linux it is the parent.
    """
    pid = os.getppid()
    while sys.platform == "linux" and (parent := _parent_with(pid, f"{name}={value}".encode())) is not None:
        pid = parent
    return pid


def _parent_with(pid: int, variable: bytes) -> int | None:
    """The parent of a process that has a variable in its environment; None without it, or if that cannot be read."""
    folder = Path(f"/proc/{pid}")
    try:
        if variable not in (folder / "environ").read_bytes().split(b"\0"):
            return None
        status = (folder / "status").read_text()
    except OSError:
        return None
    parent = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    return parent or None
