"""Pulses: what each rank of a machine said of itself last, in memory that the process which guards it sees, too.

A watchdog is a thread of its rank. A rank that a signal has stopped, or whose main thread keeps Python's lock inside
native code, has no watchdog either. Then its last pulse gets old, and the guard says what the watchdog cannot. Why a
process is silent is what the system says of its state (`why_silent`).
"""

import json
import mmap
import os
import signal
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import Struct

SLOT = 4096
STACKS_SIGNAL = signal.SIGRTMIN + 9 if sys.platform == "linux" else 0
"""At it a rank writes the stack of its main thread. A real-time signal, which no launcher is known to send."""
_HEAD = Struct("<II")  # length and sum of the text behind it


@dataclass(frozen=True)
class Pulse:
    """State of a rank in words: `who` it is and where it was `seen`, with the limit of its phase and the flag of that.

    `number` grows with every pulse. `trace` is the descriptor, in its process, of a file where STACKS_SIGNAL adds the
    stack of its main thread; -1 where the signal must not be sent.
    """

    number: int
    pid: int
    who: str
    seen: str
    limit: float
    flag: str
    trace: int = -1
    ended: bool = False


class Pulses:
    """Pulses of some ranks in shared memory: that of a descriptor, or without one memory for forked children."""

    def __init__(self, count: int, descriptor: int = -1) -> None:
        self.count = count
        self._memory = mmap.mmap(descriptor, count * SLOT)

    def put(self, place: int, pulse: Pulse) -> None:
        """Replace the pulse of a place."""
        text = json.dumps(asdict(pulse)).encode()
        if len(text) > SLOT - _HEAD.size:
            longer = len(text) - (SLOT - _HEAD.size)
            text = json.dumps(asdict(pulse) | {"seen": pulse.seen[: max(0, len(pulse.seen) - longer - 16)]}).encode()
        if len(text) <= SLOT - _HEAD.size:
            begin = place * SLOT
            self._memory[begin : begin + _HEAD.size + len(text)] = _HEAD.pack(len(text), zlib.crc32(text)) + text

    def get(self, place: int) -> Pulse | None:
        """The pulse of a place; None if there is none, or while it is being replaced."""
        begin = place * SLOT
        length, checksum = _HEAD.unpack_from(self._memory, begin)
        text = self._memory[begin + _HEAD.size : begin + _HEAD.size + min(length, SLOT - _HEAD.size)]
        return Pulse(**json.loads(text)) if length and zlib.crc32(text) == checksum else None


def memory_file(name: str) -> int:
    """Descriptor of a new file in memory; OSError where there is none."""
    create = getattr(os, "memfd_create", None)  # a Python that was built for an old glibc has none
    if create is None:
        raise OSError("this Python has no os.memfd_create")
    descriptor: int = create(name)
    return descriptor


def pulses_of_children(count: int, start_method: str) -> Pulses | None:
    """Memory that forked children share with this process; None where children are not forked."""
    return Pulses(count) if start_method == "fork" and sys.platform == "linux" else None


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
