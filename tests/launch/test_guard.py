"""A guard asks a silent process for its stacks where that is safe; it never asks a stopped one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatronish.launch.guard import Guard
from megatronish.launch.pulse import Pulse, Pulses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pulses are there on Linux alone")

PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading
from megatronish.launch.pulse import STACKS_SIGNAL
trace = os.memfd_create("stacks")
signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
faulthandler.register(STACKS_SIGNAL, file=trace, all_threads=True)

def keeps_the_lock():
    for _ in range(2):  # a signal ends one of them
        ctypes.PyDLL(None).sleep(60)

threading.Thread(target=threading.Event().wait, daemon=True).start()
print(trace, flush=True)
keeps_the_lock()
"""


Silent = tuple["subprocess.Popen[str]", Pulses, Path]


@pytest.fixture
def silent() -> Iterator[Silent]:
    """A process whose main thread keeps Python's lock, and its one pulse with a limit of a second."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        trace = int(process.stdout.readline())
        pulses = Pulses(1)
        pulses.put(0, Pulse(1, process.pid, "rank 0", "in step 3", 1.0, "--hang-seconds", trace=trace))
        yield process, pulses, Path(f"/proc/{process.pid}/fd/{trace}")
    finally:
        process.kill()
        process.wait()


def _look(guard: Guard, seconds: float) -> dict[int, str]:
    end = time.monotonic() + seconds
    sentences: dict[int, str] = {}
    while time.monotonic() < end and not sentences:
        time.sleep(0.1)
        sentences = guard.look()
    return sentences


def test_a_silent_process_writes_the_stack_of_its_main_thread(silent: Silent) -> None:
    process, pulses, stacks = silent
    sentence = _look(Guard(pulses), 20)[0]
    assert f"process {process.pid} does not respond" in sentence and "<string>:10 keeps_the_lock < " in sentence
    assert stacks.read_text().count("Current thread") == 1  # it was asked once


def test_a_stopped_process_is_not_asked_and_finds_no_request_when_it_runs_again(silent: Silent) -> None:
    """Its stacks would be written in the moment when it runs again, while frames change: that once ended a run."""
    process, pulses, stacks = silent
    os.kill(process.pid, signal.SIGSTOP)
    sentence = _look(Guard(pulses), 20)[0]
    assert "is stopped by a signal" in sentence and "Its stack" not in sentence
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert stacks.read_text() == ""


def test_a_process_is_not_asked_before_its_time_is_over(silent: Silent) -> None:
    """A signal ends the waits of native code, and the process may come to life."""
    _, pulses, stacks = silent
    assert not _look(Guard(pulses), 1.5) and stacks.read_text() == ""
