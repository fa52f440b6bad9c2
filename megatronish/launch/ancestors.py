"""Ancestors of a rank: the launcher that started the ranks of this machine, which no rank outlives.

A rank that trains on without its agent keeps the lock of the run folder, and the next start is refused.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
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


RUN_ID = "TORCHELASTIC_RUN_ID"
SECONDS = 1.0  # between two looks at a process that is no parent


def end_with_parent() -> None:
    """However the parent ends, by SIGKILL too, this process ends by SIGKILL. Linux alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def end_with_agent(environ: Mapping[str, str] = os.environ) -> None:
    """Under torchrun this process does not outlive the agent, also where a shell is between the two. Linux alone."""
    if RUN_ID not in environ or sys.platform != "linux":
        return
    agent = starter(RUN_ID, environ[RUN_ID])
    if agent == os.getppid():
        end_with_parent()
    if os.getppid() == 1:  # it had ended before that
        os._exit(1)
    threading.Thread(target=_watch, args=(agent,), name="agent", daemon=True).start()


def _watch(agent: int) -> None:
    while _is_running(agent):
        time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
