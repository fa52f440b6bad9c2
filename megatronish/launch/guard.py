"""Guard of ranks: a process that sees their pulses, and says which of them are silent when none of them can.

The launcher of this package guards the ranks that it has forked. A rank that another launcher has started, or that is
alone, starts a small process of its own for that, which ends with it. A guard waits a little longer than watchdogs do:
where one of them is left, it knows more. Linux alone.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megatronish.launch.elastic import report_to_torchrun
from megatronish.launch.patience import within
from megatronish.launch.pulse import SLOT, STACKS_SIGNAL, Pulse, Pulses, memory_file, state_of, why_silent

LOOK_SECONDS = 0.5
PATIENCE = 1.25  # beyond the limit of a phase, for a watchdog to say it better; reading stacks may take a second more
_MOST = 4  # ranks that are described
_FRAMES = 5
_BEGIN = "most recent call first"  # of what C code of Python writes
_STACKS_SECONDS = 1.0  # for processes to write their stacks: on busy cores that takes a while


class Guard:
    """Guard of the ranks that leave these pulses, by looks at intervals of about LOOK_SECONDS.

    Its clock pauses while the guard itself is stopped: Ctrl-Z stops all processes of a terminal, and fg lets them
    continue.
    """

    def __init__(self, pulses: Pulses) -> None:
        self._pulses = pulses
        self._clock, self._looked = 0.0, time.monotonic()
        self._newest: dict[int, tuple[Pulse, float]] = {}

    def look(self) -> dict[int, str]:
        """{place of a rank: sentence} of those that are silent, once one of them has been it for too long."""
        now = time.monotonic()
        self._clock += min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        for place in range(self._pulses.count):
            pulse, known = self._pulses.get(place), self._newest.get(place)
            if pulse is not None and (known is None or known[0].number != pulse.number):
                self._newest[place] = pulse, self._clock
        silent = {
            place: self._clock - since
            for place, (pulse, since) in self._newest.items()
            if not pulse.ended and self._clock - since > 0.4 * pulse.limit
        }
        if not any(seconds > self._newest[place][0].limit + PATIENCE for place, seconds in silent.items()):
            return {}
        pulses = {place: self._newest[place][0] for place in silent}
        why = {place: why_silent(pulse.pid) for place, pulse in pulses.items()}  # before a signal changes it
        stacks = _written_stacks(pulses)
        return {
            place: _sentence(pulse, silent[place], why[place], stacks.get(place, "")) for place, pulse in pulses.items()
        }

    def flag(self, place: int) -> str:
        """How long a rank may be silent, and by which flag."""
        pulse = self._newest[place][0]
        return f"(a rank may make no progress for {pulse.limit:g} s here: {pulse.flag})"

    def forget(self, place: int) -> None:
        """Guard a rank no longer: it has ended."""
        self._newest.pop(place, None)


def report_of(sentences: Mapping[int, str], flag: str) -> str:
    """The report of a run whose ranks are silent."""
    several = list(sentences.values())
    lines = several[:_MOST]
    if len(several) > _MOST:
        lines.append(f"so are {len(several) - _MOST} more: ranks {', '.join(map(str, list(sentences)[_MOST:]))}")
    return "\n".join(["the run hangs: " + lines[0], *lines[1:], flag])


def _sentence(pulse: Pulse, seconds: float, why: str, written: str) -> str:
    stack = _stack_of(written)
    seen = re.sub(r"\. Its stack: .*", "", pulse.seen, flags=re.DOTALL) if stack else pulse.seen
    return f"{pulse.who} is silent for {seconds:.0f} s: process {pulse.pid} {why}. It was last seen {seen}{stack}"


def _written_stacks(silent: Mapping[int, Pulse]) -> dict[int, str]:
    """What main threads of some processes write of their stacks when they are asked; nothing of those that cannot be.

    C code of Python reads frames while it writes them: that is safe only where they do not change. So no timer of the
    process does it, which would be over just when a stopped process runs again. And none is asked before its run is to
    be ended, for a signal ends the waits of native code.
    """
    stacks: dict[int, str] = {}
    with contextlib.ExitStack() as files:
        # They are opened first: a process whose wait has ended may be gone before they are read.
        asked = {place: file for place, pulse in silent.items() if (file := _opened(pulse, files)) is not None}
        for place in asked:
            with contextlib.suppress(OSError):
                os.kill(silent[place].pid, STACKS_SIGNAL)
        deadline, is_whole = time.monotonic() + _STACKS_SECONDS, not asked
        while not is_whole and time.monotonic() < deadline:
            time.sleep(0.02)
            before, stacks = stacks, {place: _text_of(file) for place, file in asked.items()}
            is_whole = stacks == before and all(_BEGIN in text for text in stacks.values())
    return stacks


def _opened(pulse: Pulse, files: contextlib.ExitStack) -> BinaryIO | None:
    """The file for the stack of a process that can write there; None if it cannot, or is another one by now."""
    path = Path(f"/proc/{pulse.pid}/fd/{pulse.trace}")
    try:
        if pulse.trace < 0 or state_of(pulse.pid) not in ("R", "S") or not str(path.readlink()).startswith("/memfd:"):
            return None
        return files.enter_context(path.open("rb", buffering=0))
    except OSError:
        return None


def _text_of(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _stack_of(text: str) -> str:
    """The stack in words, of the thread that got the signal: the main one, which the system prefers."""
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', text.partition(_BEGIN)[2])
    lines = [f"{'/'.join(Path(file).parts[-2:])}:{line} {function}" for file, line, function in frames[:_FRAMES]]
    return f". Its stack: {' < '.join(lines)}" if lines else ""


class OwnGuard:
    """Process that guards the rank of this process, and its pulses; it writes to the descriptor `terminal`."""

    def __init__(self, terminal: int) -> None:
        descriptor = memory_file("pulses")
        os.ftruncate(descriptor, SLOT)
        self.pulses = Pulses(1, descriptor)
        root = str(Path(__file__).parents[2])
        program = f"import sys; sys.path.insert(0, {root!r}); from megatronish.launch.guard import main; main()"
        command = [sys.executable, "-S", "-c", program, str(descriptor), str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=terminal, pass_fds=[descriptor]
        )
        os.close(descriptor)

    def end(self) -> None:
        """End the process that guards."""
        with contextlib.suppress(OSError):
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@contextlib.contextmanager
def own_guard(terminal: int) -> Iterator[Pulses | None]:
    """Pulses of this process alone, guarded by another one; None where there can be none."""
    try:
        guard = OwnGuard(terminal) if sys.platform == "linux" else None
    except OSError:  # no more processes, or no memory: a run that does not hang never needs it
        guard = None
    try:
        yield None if guard is None else guard.pulses
    finally:
        if guard is not None:
            guard.end()


def main(argv: Sequence[str] | None = None) -> None:
    """Guard the process that has started this one, until either ends."""
    descriptor, parent = map(int, argv or sys.argv[1:])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # they are for the rank
    guard = Guard(Pulses(1, descriptor))
    while os.getppid() == parent:
        ready: Any = select.select([0], [], [], LOOK_SECONDS)[0]
        if ready:  # the pipe is closed: the rank has ended
            return
        if sentences := guard.look():
            report = report_of(sentences, guard.flag(0))
            within(1.0, partial(os.write, 2, f"{report}\n".encode()), otherwise=0)
            within(1.0, partial(report_to_torchrun, report), otherwise=None)
            if os.getppid() == parent:
                with contextlib.suppress(OSError):
                    os.kill(parent, signal.SIGKILL)
            os._exit(0)
