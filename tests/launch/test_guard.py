"""A guard asks a silent process for its stacks where that is safe; it never asks a stopped one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatronish.launch import guard
from megatronish.launch.guard import Guard, own_guard
from megatronish.launch.pulse import Pulse, Pulses, memory_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pulses are there on Linux alone")

PROGRAM = """
import ctypes, os, sys, threading
from megatronish.core.layout import Layout
from megatronish.launch.pulse import STACKS_SIGNAL, Pulses
from megatronish.watch.observer import HangLimits
from megatronish.watch.record import RankRecord
from megatronish.watch.watchdog import Watchdog

def watchdog():
    limits = HangLimits.of(step=9.0, start=9.0, evaluation=9.0, save=9.0, timeout=600.0)
    made = Watchdog(RankRecord(), limits, Layout(), rank=0, leave=lambda *_: None)
    made.pulse_to(Pulses(1), 0)
    return made

with watchdog():
    pass
os.kill(os.getpid(), STACKS_SIGNAL)  # too late for that one: nothing happens

def keeps_the_lock():
    ctypes.PyDLL(None).sleep(60)  # a signal ends it, and so the process

for _ in range(200):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
second = watchdog()
print(second._trace, flush=True)
keeps_the_lock()
os._exit(0)
"""


Silent = tuple["subprocess.Popen[str]", Pulses, Path]


LIMIT = 0.4


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    """A process whose main thread keeps Python's lock, and its one pulse, with a short limit."""
    monkeypatch.setattr(guard, "PATIENCE", 0.6)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        trace = int(process.stdout.readline())
        pulses = Pulses(1)
        pulses.put(0, Pulse(1, process.pid, "rank 0", "in step 3", LIMIT, "--hang-seconds", trace=trace))
        yield process, pulses, Path(f"/proc/{process.pid}/fd/{trace}")
    finally:
        process.kill()
        process.wait()


def _look(own: Guard, seconds: float) -> dict[int, str]:
    end = time.monotonic() + seconds
    sentences: dict[int, str] = {}
    while time.monotonic() < end and not sentences:
        time.sleep(0.1)
        sentences = own.look()
    return sentences


def test_a_silent_process_writes_the_stack_of_its_main_thread(silent: Silent) -> None:
    """Though it ends with that, and though it has more threads than are written."""
    process, pulses, _ = silent
    sentence = _look(Guard(pulses), 20)[0]
    assert f"process {process.pid} does not respond" in sentence
    assert re.search(r"\. Its stack: <string>:\d+ keeps_the_lock < <string>:\d+ <module>$", sentence)


def test_a_stopped_process_is_not_asked_and_finds_no_request_when_it_runs_again(silent: Silent) -> None:
    """Its stacks would be written in the moment when it runs again, while frames change: that once ended a run."""
    process, pulses, stacks = silent
    os.kill(process.pid, signal.SIGSTOP)
    sentence = _look(Guard(pulses), 20)[0]
    assert "is stopped by a signal" in sentence and "Its stack" not in sentence
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.3)
    assert stacks.read_text() == ""


def test_a_process_is_not_asked_before_its_time_is_over(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the waits of native code, and the process may come to life."""
    monkeypatch.setattr(guard, "PATIENCE", 5.0)
    _, pulses, stacks = silent
    assert not _look(Guard(pulses), 1.5 * LIMIT) and stacks.read_text() == ""


def test_a_process_of_another_time_with_the_same_number_gets_no_signal(silent: Silent) -> None:
    """What the number of the file is there now tells them apart."""
    process, pulses, stacks = silent
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        pulses.put(0, Pulse(2, other.pid, "rank 0", "in step 3", LIMIT, "--hang-seconds", trace=0))
        assert "Its stack" not in _look(Guard(pulses), 20)[0] and other.poll() is None
        other.kill()
    assert process.poll() is None and stacks.read_text() == ""


def test_a_python_without_files_in_memory_watches_without_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built for an old glibc, as some package managers have it."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="memfd_create"):
        memory_file("stacks")
    with own_guard(2) as pulses:
        assert pulses is None
