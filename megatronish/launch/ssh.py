"""The launcher of a run on the hosts of a hostfile: over ssh, with their output, and one end for all of them.

Nothing outlives it: each host ends when its standard input does (host.py), which happens when this process ends,
however it ends, and when a connection is lost. What ssh asks on a terminal, such as a password, it may not ask here.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import BinaryIO, NamedTuple, TextIO

from megatronish.core.errors import UserError, signal_name
from megatronish.launch.host import FORWARDED, LEAVE_SECONDS, LOOK_SECONDS, LOST, HostPlan, peer_seconds
from megatronish.launch.hostfile import Host

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
CONNECT_SECONDS = 60.0
END_SECONDS = 5.0  # beyond what a host itself waits, before its connection is given up
NOT_FOUND = 127
"""Exit status of a shell that finds no such command."""

EXPORTED = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "OMP_", "MKL_", "CUBLAS_", "TRITON_", "HF_", "WANDB_", "MLFLOW_")
EXPORTED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that every host gets: the beginnings of names, and names. --export adds others."""


class Reach(NamedTuple):
    """How hosts are reached: further options of ssh, such as ("-p", "2222")."""

    options: tuple[str, ...] = ()

    def words(self, host: str, command: str) -> list[str]:
        """Words of the process that runs a shell command on a host; on this machine without ssh."""
        if is_here(host):
            return ["sh", "-c", command]
        return ["ssh", *OPTIONS, *self.options, host, command]


def is_here(host: str) -> bool:
    """Whether a host is this machine."""
    return host in ("localhost", "127.0.0.1", socket.gethostname())


def exported(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """Variables for all hosts: those of EXPORTED, and those of --export NAME or NAME=VALUE."""
    variables = {name: value for name, value in environ.items() if name.startswith(EXPORTED) or name in EXPORTED_NAMES}
    for word in asked:
        name, equals, value = word.partition("=")
        if not name:
            raise UserError(f"--export {word} names no variable; give NAME, or NAME=VALUE")
        if not equals and name not in environ:
            raise UserError(f"--export {name}: {name} is not set here; export it first, or give {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def address_of(host: str, reach: Reach) -> str:
    """Address of the first host at which the others reach it: the first that it says of itself, else its name."""
    try:
        said = subprocess.run(
            reach.words(host, "hostname -I"), capture_output=True, stdin=subprocess.DEVNULL, timeout=CONNECT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(_unreachable(host, reach, f"does not answer in {CONNECT_SECONDS:.0f} s")) from None
    except FileNotFoundError:
        raise UserError("there is no ssh on this machine; install it, or start each host with --no-ssh") from None
    if said.returncode == LOST:
        words = said.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(_unreachable(host, reach, f"cannot be reached: {words[-1] if words else 'ssh says nothing'}"))
    addresses = said.stdout.decode(errors="replace").split() if said.returncode == 0 else []
    return addresses[0] if addresses else host


def _unreachable(host: str, reach: Reach, why: str) -> str:
    test = shlex.join(["ssh", *OPTIONS[:2], *reach.options, host, "true"])
    return f"host {host} {why}; this must work without a password: {test}"


@dataclass
class RunningHost:
    """A host with the process that runs it, and the threads that forward its output.

    `was_ended`: it still ran when the run was over, so how it ended says nothing.
    """

    name: str
    process: subprocess.Popen[bytes]
    ended_at: float | None = None
    was_ended: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def say(self, data: bytes) -> None:
        """Write to the host, if it is still there."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def leave(self) -> None:
        """End the host's input, by which its ranks end."""
        self.was_ended = not self.has_ended()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def has_ended(self) -> bool:
        """Whether it has ended; notes when that was seen first."""
        if self.ended_at is None and self.process.poll() is not None:
            self.ended_at = time.monotonic()
        return self.ended_at is not None


def run_hosts(hosts: Sequence[Host], plans: Sequence[HostPlan], *, reach: Reach, folder: str, python: str) -> int:
    """Start the ranks of all hosts, and wait for them; the exit status of the run."""
    command = f"cd {shlex.quote(folder)} && exec {_python(python)} -m megatronish.launch.host"
    running: list[RunningHost] = []
    with _signals() as received:
        try:
            for host, plan in zip(hosts, plans, strict=True):
                running.append(_started(host.name, reach.words(host.name, command), plan))
            _wait(running, received)
        finally:  # whatever happened here
            _end(running)
    return _tell(running, received)


def _python(python: str) -> str:
    """The interpreter with the path of packages that it has here, as a shell reads it."""
    path = os.environ.get("PYTHONPATH")
    return shlex.quote(python) if path is None else f"env PYTHONPATH={shlex.quote(path)} {shlex.quote(python)}"


def _started(name: str, words: list[str], plan: HostPlan) -> RunningHost:
    # A session of its own: a Ctrl-C of the terminal is for this process, which passes it on.
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    host = RunningHost(name, process)
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        thread = threading.Thread(target=_forward, args=(name, source, target), daemon=True)
        thread.start()
        host.threads.append(thread)
    host.say(plan.line())
    return host


def _forward(name: str, source: BinaryIO, target: TextIO) -> None:
    """Every line of a host, with its name before it."""
    for line in source:
        text = line.decode(errors="replace").rstrip("\r\n")
        with contextlib.suppress(OSError, ValueError):  # without a reader the run goes on
            target.write(f"{name}: {text}\n")
            target.flush()


def _wait(hosts: Sequence[RunningHost], received: list[int]) -> None:
    """Pass signals on, until all hosts have ended, or one has failed and the others had time to say why."""
    passed, give_up_at = 0, float("inf")
    while not _have_ended(hosts):
        for signum in received[passed:]:
            passed += 1
            is_second = received[:passed].count(signal.SIGINT) > 1
            for host in hosts:
                host.say(b"%d\n" % (signal.SIGKILL if is_second else signum))
        for code in [host.process.returncode or 0 for host in hosts if host.ended_at is not None]:
            if code != 0:
                give_up_at = min(give_up_at, time.monotonic() + peer_seconds(code, lost=code < 0 or code == LOST))
        if time.monotonic() > give_up_at:
            return
        time.sleep(LOOK_SECONDS)


def _have_ended(hosts: Sequence[RunningHost]) -> bool:
    return sum(host.has_ended() for host in hosts) == len(hosts)  # every host is looked at


def _end(hosts: Sequence[RunningHost]) -> None:
    """End every host, and wait until it has ended; a connection that does not end is given up."""
    for host in hosts:
        host.leave()
    until = time.monotonic() + LEAVE_SECONDS + END_SECONDS
    while time.monotonic() < until and not _have_ended(hosts):
        time.sleep(LOOK_SECONDS)
    for host in hosts:
        if not host.has_ended():
            print(f"host {host.name} does not end; look there for what is left of it", file=sys.stderr)
            host.process.kill()
            host.process.wait()
        for thread in host.threads:
            thread.join(timeout=1)


def _tell(hosts: Sequence[RunningHost], received: Sequence[int]) -> int:
    """The sentence about the host that is the reason, and the exit status of the run."""
    failed = [host for host in hosts if host.process.returncode and not host.was_ended]
    if not failed:
        return 0
    if received and received[0] in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        return 128 + received[0]
    # A lost connection and a signal are reasons; what fails of itself may only have lost them. Of equals, the earliest.
    first = min(failed, key=lambda host: (_rank_of(host.process.returncode), host.ended_at))
    code = first.process.returncode
    others = "" if len(hosts) == 1 else "; the other hosts were ended"
    print(f"host {first.name} {_how(code)}{others}", file=sys.stderr, flush=True)
    return 1 if code in (LOST, NOT_FOUND) or code < 0 else code


def _rank_of(code: int) -> int:
    """Order of suspicion of an exit status."""
    return 0 if code == LOST or code < 0 else 1 if code > 128 else 2


def _how(code: int) -> str:
    if code == LOST:
        return "cannot be reached, or was lost (ssh has ended with status 255)"
    if code == NOT_FOUND:
        return f"has no {sys.executable}: the same Python must be there, at the same path (status 127)"
    if code < 0:
        return f"was lost: its process here was ended by {signal_name(-code)}"
    if code > 128 and code - 128 in signal.valid_signals():
        return f"has failed: a rank was ended by {signal_name(code - 128)}"
    return f"has failed with status {code}"


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that come meanwhile, in their order."""
    received: list[int] = []

    def receive(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)

    before = {signum: signal.signal(signum, receive) for signum in FORWARDED}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
