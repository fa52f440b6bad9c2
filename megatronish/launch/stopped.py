"""State of processes of this machine, as the system says it: whether one is stopped, and why one may be silent."""

from pathlib import Path


def state_of(pid: int) -> str:
    """Letter of the state of a process (R, S, D, T, Z ...); empty if there is none, or if the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP, a debugger): it neither ends by itself nor answers."""
    return state_of(pid) in ("T", "t")


def why_silent(pid: int) -> str:
    """What the state of a process says of why it is silent."""
    state = state_of(pid)
    if state in ("", "Z", "X"):
        return "has ended"
    if state in ("T", "t"):
        return "is stopped by a signal"
    if state == "D":
        return "waits for a disk or a device that does not answer"
    return "does not respond: native code may keep Python's lock"
