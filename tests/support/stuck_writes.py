"""Writes that get no answer from their disk, without such a disk: for any Linux on which a process may be traced.

Whoever opens a file of the folder to write waits until the disk answers, and a tracer holds the thread that waits. The
system lets go of a process when its last thread is gone, and of a traced thread when its tracer has seen it end. So not
even SIGKILL ends who waits, as in state D.
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)
PTRACE_SEIZE = 0x4206
TO_WRITE = os.O_WRONLY | os.O_RDWR


class StuckWrites:
    """A folder that can be written until `stop`, and again after `answer`."""

    def __init__(self, folder: Path) -> None:
        self._stopped, self._address = folder.with_name("stopped"), str(folder.with_name("tracer"))
        self._folder = f"{folder}/"
        self._tracer: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """From now on nothing that is written gets an answer."""
        self._tracer = subprocess.Popen([sys.executable, "-S", __file__, self._address], stdout=subprocess.PIPE)
        assert self._tracer.stdout is not None
        assert self._tracer.stdout.readline() == b"ready\n"
        self._stopped.touch()

    def answer(self) -> None:
        """Answer all."""
        self._stopped.unlink(missing_ok=True)
        if self._tracer is not None:
            self._tracer.kill()
            self._tracer.communicate()
            os.unlink(self._address)
            self._tracer = None

    def is_of(self) -> None:
        """Planted in a job: its processes write to this disk."""
        waiting = threading.local()

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or not str(arguments[0]).startswith(self._folder) or not arguments[2] & TO_WRITE:
                return
            if self._stopped.exists() and not getattr(waiting, "waits", False):
                waiting.waits = True
                self._wait()
                waiting.waits = False

        sys.addaudithook(audit)

    def _wait(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # else the system may want it to be a child
        with socket.socket(socket.AF_UNIX) as tracer:
            tracer.connect(self._address)
            tracer.sendall(f"{threading.get_native_id()}\n".encode())
            tracer.recv(1)  # it is traced now
        while self._stopped.exists():
            time.sleep(0.05)


def can_trace() -> bool:
    """Whether a process of this user may trace another one that lets it."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text()) < 2 or os.getuid() == 0
    except OSError:
        return sys.platform == "linux"


def trace(address: str) -> None:
    """Hold every thread that asks for it, until this process is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            peer, _ = listener.accept()
            with peer:
                if libc.ptrace(PTRACE_SEIZE, int(peer.recv(64)), None, None) != 0:
                    sys.exit(os.strerror(ctypes.get_errno()))
                peer.sendall(b".")


if __name__ == "__main__":
    trace(sys.argv[1])
