"""Commands in forked children: `megatronish ARGV` in a few tenths of a second, with its status, words and seconds.

The parent has imported all and computed nothing. A child has a process group, a folder, an environment and limits of
its own; one that does not end in time is killed with its children.
"""

import contextlib
import ctypes
import importlib
import os
import pkgutil
import resource
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import megatronish
from megatronish.commands import main as command_line
from megatronish.launch.local import WARM

MOST_BYTES = 4 << 30
"""Memory that a child may have beyond that of its parent."""
BUSY = 2.5
"""Times the limit, by the clock: other work may have the processor."""
LAZY = ("torch._inductor.config", "matplotlib.pyplot", "safetensors.torch", "sentencepiece", "tokenizers", "jinja2")
"""What commands import late."""


@dataclass(frozen=True)
class Command:
    """A command line with its folder and environment; `without_rights`: as root is no exception to permissions."""

    argv: tuple[str, ...]
    folder: Path
    environ: tuple[tuple[str, str], ...] = ()
    without_rights: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status (None: it was killed for its time), and what it wrote."""

    status: int | None
    output: str
    errors: str
    seconds: float


def import_all() -> None:
    """Import what commands import, so that no child has to: also what they import late."""
    for name in (*WARM, *LAZY):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for found in pkgutil.walk_packages(megatronish.__path__, "megatronish."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)


def drop_rights() -> None:
    """Give up all capabilities: root then is refused what the mode of a file refuses to its owner. Linux."""
    header = struct.pack("Ii", 0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class Child:
    """A command while it runs."""

    def __init__(self, command: Command, *, limit: float) -> None:
        self.command, self._start, self._limit = command, time.monotonic(), limit
        self.files = tuple(command.folder / name for name in (".stdout", ".stderr"))
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_command(command, self.files)

    def ended(self) -> Ended | None:
        """How it has ended; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self._start
        if pid == 0 and (seconds < self._limit or (seconds < BUSY * self._limit and self._used() < self._limit)):
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what it has left
        if pid == 0:
            os.waitpid(self.pid, 0)
        texts = [path.read_bytes().decode(errors="backslashreplace") for path in self.files]
        return Ended(os.waitstatus_to_exitcode(status) if pid else None, *texts, seconds)

    def _used(self) -> float:
        """Seconds of the processor that it and its children have used; on a busy machine that is less than the clock's.

        A process that waits for ever uses none, so it is given as much as one that computes.
        """
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.pid:  # its process group
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


def _be_command(command: Command, files: tuple[Path, ...]) -> None:
    status = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in zip((1, 2), files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(command.folder)
        os.environ.update(command.environ)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        if command.without_rights:
            drop_rights()
        sys.argv = ["megatronish", *command.argv]
        status = command_line.main()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 255)
