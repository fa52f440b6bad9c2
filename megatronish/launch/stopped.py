"""Processes that a signal has stopped (SIGSTOP, a debugger): they neither end by themselves nor answer."""

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped; False if it has ended, and where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in ("T", "t")
