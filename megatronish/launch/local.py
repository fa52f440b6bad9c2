"""The launcher: a run in this process if it is a rank already, else local ranks forked from this warm process.

The launcher has imported torch but computed nothing and not touched CUDA; so a fork is safe, and eight ranks stand in
about a second where spawned ones take five and torchrun six. A rank tells how it ended through a pipe *before* its
sockets close. That is why the launcher can name the rank that failed first, and not one that merely lost its peer:

    a failed rank that said nothing was killed by a signal, and is the culprit; else it is the earliest to have spoken.

Ranks never outlive the launcher, and the first failure ends them all.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from megatronish.core.errors import UserError, signal_name
from megatronish.launch.ancestors import end_with_agent, end_with_parent
from megatronish.launch.cleanup import meeting_folder
from megatronish.launch.guard import LOOK_SECONDS, Guard, report_of
from megatronish.launch.imports import importing
from megatronish.launch.place import Place, place_from_environment, refuse_too_many, threads_per_rank
from megatronish.launch.pulse import Pulses, is_stopped, pulses_of_children
from megatronish.launch.rank import DISK_SECONDS, INTERRUPTED, Ending, failure, run_here, run_rank
from megatronish.launch.restarts import Restarts
from megatronish.launch.slurm import unused_places
from megatronish.launch.terminal import open_streams, say, say_at_once

# CUDA is no reason for another method: a driver that the parent never touched does not mind the fork. macOS is: its
# system libraries do not survive one, and a spawned rank imports torch by itself, a few seconds later.
START_METHOD: Literal["fork", "spawn"] = "spawn" if sys.platform == "darwin" else "fork"

# Every rank would import these by itself in its first step: seconds on each, when it can be half a second once.
WARM = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint")

GRACE_SECONDS = 0.2  # after the first failure, for others to say that they failed earlier
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ABORT_SECONDS = 2.0  # the same where a rank was ended by SIGABRT
FINISH_SECONDS = 300.0  # for the ranks that still run when one has finished
STOPPED_LOOKS = 10  # in a row, at which one of them is stopped: nobody is left who would tell
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of them, those after which no run begins again
REASONS: dict[int, str] = {
    signal.SIGKILL: " (by hand, or because memory ran out)",
    signal.SIGABRT: " (a library of C++ has given up: its last words are in the log of the rank)",
    signal.SIGBUS: (
        " (a file that it reads was cut short, of --data-path or its cache; or /dev/shm or the temporary directory is "
        "full: look at df; or a disk failed)"
    ),
}
LEAVE_SECONDS = 1.0  # between SIGTERM and SIGKILL for ranks that are in the way
HANG_LEAVE_SECONDS = 0.3  # the same where the run hangs: what could react has left by itself
KILL_SECONDS = 0.5  # for a process to end after SIGKILL; one that waits for a disk does not
JOIN_SECONDS = 0.01  # between two looks at ranks that end
STUCK_SECONDS = 300.0  # for a disk, before a restart


def launch(
    function: Callable[[Place], int],
    *,
    world_size: int,
    log_dir: Path | None = None,
    interactive: bool = False,
    restarts: Restarts | None = None,
    patience: float = DISK_SECONDS,
) -> int:
    """Run `function` on every rank of a run of `world_size`; the exit status of the run.

    `function` returns an exit status: 0 for finished. A UserError it raises ends the run with its sentence and 2,
    anything else with a traceback and 1. Under torchrun, srun or mpirun this process is one rank; a single rank runs in
    this process too; else the ranks are its children. Call it from the main thread, with signals as they are.
    `interactive`: rank 0 reads the terminal, so Ctrl-C is for it alone, if it handles SIGINT. `restarts` are for ranks
    that are children of this process, which a single one then is, too; other launchers have restarts of their own. The
    disk of the logs has `patience` seconds to answer.
    """
    open_streams()
    # 1. What is this process? A rank of another launcher has a place in its environment; a single rank without restarts
    # needs no other process. Everything else forks.
    restarts = restarts or Restarts()
    place = place_from_environment()
    if place is None:
        refuse_too_many(world_size)
    if place is None and (note := unused_places(os.environ, world_size=world_size)) is not None:
        print(f"note: {note}", file=sys.stderr)
    place = place or (Place() if world_size == 1 and restarts.most == 0 else None)
    if place is None:
        ranks: dict[str, Any] = {"world_size": world_size, "log_dir": log_dir, "interactive": interactive}
        return run_local_ranks(function, **ranks, restarts=restarts, patience=patience)

    # 2. A rank of another launcher, which knows nothing of the layout: too few or too many ranks would wait for each
    # other in the first collective, so each compares the numbers before it meets them.
    def checked(place: Place) -> int:
        if place.world_size != world_size:
            raise UserError(
                f"the layout needs {world_size} ranks but {place.world_size} were started; change the layout, or start "
                f"{world_size} (torchrun --nproc-per-node, srun --ntasks, mpirun -n)"
            )
        return function(place)

    if place.rendezvous is not None and place.is_on_one_machine:
        meet_on_loopback()
    if place.world_size > 1 or place.rendezvous is not None:
        end_with_agent()
    _use_threads(place)
    return run_here(checked, place, log_dir, patience=patience)


def run_local_ranks(
    function: Callable[[Place], int],
    *,
    world_size: int,
    log_dir: Path | None = None,
    start_method: Literal["fork", "spawn"] = START_METHOD,
    interactive: bool = False,
    restarts: Restarts | None = None,
    patience: float = DISK_SECONDS,
) -> int:
    """Start `world_size` ranks on this machine, wait for them, tell the first failure; the exit status of the run."""
    # Before the first fork: ranks share what is imported here, and each attempt of a restart starts as quickly as the
    # first.
    with importing():
        for module in WARM:
            importlib.import_module(module)
    restarts = restarts or Restarts()
    ranks = _RanksToStart(function, world_size, log_dir, start_method, interactive, patience)
    launch, begin = uuid.uuid4().hex, time.monotonic()
    while True:
        attempt = _attempt(ranks, launch, begin)
        # A process that waits for a disk may keep GPU memory and the lock of the run folder: a restart next to it would
        # fail, so it waits until that process has ended, or there is none.
        if attempt.stuck and not _ended_later(attempt.stuck, waits=restarts.most > 0 and not attempt.was_asked_to_end):
            return attempt.status
        if attempt.was_asked_to_end or not restarts.again(attempt.status, attempt.sentence):
            return attempt.status


class _RanksToStart(NamedTuple):
    function: Callable[[Place], int]
    world_size: int
    log_dir: Path | None
    start_method: Literal["fork", "spawn"]
    interactive: bool
    patience: float


class _Attempt(NamedTuple):
    """How the ranks have ended: the exit status, the sentence that was printed, and whether a signal asked for it.

    `stuck` are ranks that not even SIGKILL has ended.
    """

    status: int
    sentence: str = ""
    was_asked_to_end: bool = False
    stuck: tuple["LocalRank", ...] = ()


def _attempt(wanted: _RanksToStart, launch: str, begin: float) -> _Attempt:
    """Start the ranks, and wait for them; the first attempt of the launch began at `begin`."""
    function, world_size, log_dir, start_method, interactive, patience = wanted
    context = multiprocessing.get_context(start_method)
    ranks: list[LocalRank] = []
    pulses = pulses_of_children(world_size, start_method)
    stuck: tuple[LocalRank, ...] = ()
    forwarded = _forwarded_signals(ranks, ignores_interrupts=interactive)
    # A folder for each attempt: ranks that meet by a file must not find what those of a failed attempt have written.
    with meeting_folder() as folder, forwarded as received:
        try:
            with _signals_held():
                for rank in range(world_size):
                    sizes = rank, world_size, rank, world_size
                    place = Place(*sizes, f"file://{folder}/meet", launch=launch, launched=begin)
                    place = replace(place, guarded=partial(contextlib.nullcontext, pulses))
                    report, writer = context.Pipe(duplex=False)
                    process = context.Process(target=_be_rank, args=(function, place, log_dir, patience, writer))  # type: ignore[attr-defined]
                    process.start()
                    # Only the rank may hold the writing end: its death is then seen as the end of the pipe, and the
                    # ranks that are forked later do not inherit a copy.
                    writer.close()
                    ranks.append(LocalRank(place, process, report))
            failed = _wait_for_failures(ranks, pulses)
        # Whatever happened here, an error of this process included: no rank outlives the attempt.
        finally:
            stuck = _end(ranks)
        # Before the folder is removed: its disk may be the one that does not answer.
        asked = any(signum in _ENDING for signum in received)
        # The second Ctrl-C killed the ranks by the user's wish: no rank is a culprit, and there is nothing to report.
        if received.count(signal.SIGINT) > 1:
            return _Attempt(128 + signal.SIGINT, "", True, stuck)
        return _Attempt(*_tell(failed, received), asked, stuck) if failed else _Attempt(0, "", asked, stuck)


@dataclass
class LocalRank:
    """A local rank: its place, its process and the pipe of its report. `late`: why it was given up, if it was."""

    place: Place
    process: BaseProcess
    report: Connection
    late: str = ""
    _ending: Ending | None = None
    _is_open: bool = True

    @property
    def ending(self) -> Ending | None:
        """What the rank has said of its ending; None if it has said nothing so far, or never will."""
        try:
            if self._ending is None and self._is_open and self.report.poll():
                self._ending = self.report.recv()
        # The rank is dead and has said nothing. From here on its pipe is always readable, so `signs` leaves it out.
        except (EOFError, OSError):
            self._is_open = False
        return self._ending

    @property
    def has_failed(self) -> bool:
        """Whether the rank has ended without having finished; one that ends with 0 says so before.

        One that has said why it fails need not be able to end: a thread of it may wait for a disk.
        """
        code, ending = self.process.exitcode, self.ending
        has_said = ending is not None and ending.status != 0
        return bool(self.late) or has_said or (code is not None and (code != 0 or ending is None))

    @property
    def signs(self) -> list[Any]:
        """What `multiprocessing.connection.wait` sees when the rank has something to say, or ends."""
        is_silent = self.ending is None and self._is_open
        return [self.process.sentinel, self.report] if is_silent else [self.process.sentinel]

    def hangs(self, report: str) -> None:
        """Let the rank have ended with a report about the run, which others make of it."""
        self._ending = Ending(time.monotonic(), 1, report, is_of_run=True)


def _be_rank(
    function: Callable[[Place], int], place: Place, log_dir: Path | None, patience: float, report: Connection
) -> None:
    """The main function of a local rank: set up the process, run, report the ending, exit."""
    # 1. Signals, inherited from the launcher: its handlers must not run in a rank, and they were held during the fork.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everybody; the launcher says what it means
    for signum in FORWARDED[1:]:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # 2. The process, before any work: from here on it cannot become an orphan, and it has its own number of threads.
    _die_with_launcher()
    meet_on_loopback()
    _use_threads(place)
    ending = run_rank(function, replace(place, leave=partial(_leave, report)), log_dir, patience=patience)
    if log_dir is None:
        sys.stdout.flush()
        sys.stderr.flush()
    # 3. The report before the exit: peers fail when the sockets of this rank close, and the launcher compares the
    # times.
    report.send(ending._replace(message=ending.message and _shortened(ending.message)))
    os._exit(ending.status)  # waits for no thread and no peer; sockets close now, not before


def _leave(pipe: Connection, report: str, _is_reporter: bool) -> None:
    """End this rank with a report about the run; the launcher prints one of those that all ranks send."""
    pipe.send(Ending(time.monotonic(), 1, _shortened(report), is_of_run=True))
    os._exit(1)


def meet_on_loopback() -> None:
    """Ranks of one machine need no network, and a laptop's host name often leads nowhere."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _use_threads(place: Place) -> None:
    threads = threads_per_rank(os.environ, place.local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)


def _shortened(message: str) -> str:
    """What fits into a pipe that is not read yet; the whole message is in the rank's log."""
    return message if len(message) < 8000 else f"{message[:1000]}\n...\n{message[-7000:]}"


def _die_with_launcher() -> None:
    """However the launcher ends, by SIGKILL too, this rank does not outlive it."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if sys.platform == "linux":
        end_with_parent()
        if os.getppid() != launcher.pid:  # it had ended before that
            os._exit(1)
        return

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _wait_for_failures(ranks: Sequence[LocalRank], pulses: Pulses | None) -> list[LocalRank]:
    """Wait until every rank has ended, or shortly beyond the first failure; the ranks that failed by themselves.

    A rank that ends with 0 and does not say so has not finished. Others may not run long after one that has, and less
    long if they are stopped. Looks are counted there, for the launcher may be stopped meanwhile, too. Where all ranks
    that could say that the run hangs are silent, their guard says it.
    """
    deadline, finish, stopped = None, None, Counter[int]()
    guard = None if pulses is None else Guard(pulses)
    # Each turn looks at everything again: `wait` at its end only says that something has changed, or that it is time.
    while running := [rank for rank in ranks if rank.process.exitcode is None]:
        if deadline is None and (failed := [rank for rank in ranks if rank.has_failed]):
            # gloo aborts where ranks differ, and the others then say in what; that is worth the wait.
            aborted = any(rank.process.exitcode == -signal.SIGABRT for rank in failed)
            deadline = time.monotonic() + (ABORT_SECONDS if aborted else GRACE_SECONDS)
        # A report about the whole run names the culprit already; ranks that failed otherwise add nothing to it.
        if deadline is not None and any(rank.ending is not None and rank.ending.is_of_run for rank in ranks):
            break
        # Ranks end together, after the last barrier. One that still runs long after another has finished waits for no
        # peer: it is stopped by a signal, or its disk hangs.
        if finish is None and any(rank.process.exitcode == 0 for rank in ranks):
            finish = time.monotonic() + FINISH_SECONDS
        if deadline is None and finish is not None and (late := _late(ranks, stopped, finish)):
            for rank, why in late:
                rank.late = why
            break
        left = None if deadline is None else deadline - time.monotonic()
        # A rank that hangs is reported by the watchdog of any rank. The guard is for the case that all of these are
        # silent, too; after a failure it has nothing to add.
        if (left is not None and left <= 0) or (deadline is None and guard is not None and _are_silent(ranks, guard)):
            break
        # A helper process of a dead rank can keep its sentinel silent, so it is checked every half second.
        signs = [sign for rank in running for sign in rank.signs]
        if not wait(signs, timeout=LOOK_SECONDS if left is None else left) and finish is not None:
            pids = [rank.process.pid for rank in running if rank.process.pid is not None]
            # Numbers of looks in a row: a process that was not stopped this time is not counted any longer.
            stopped = Counter({pid: stopped[pid] + 1 for pid in pids if is_stopped(pid)})
    return [rank for rank in ranks if rank.has_failed]


def _are_silent(ranks: Sequence[LocalRank], guard: Guard) -> bool:
    """Whether ranks are silent, and none is left that would say so; the report is made theirs."""
    silent = guard.look()
    if silent:
        report = report_of(silent, guard.flag(next(iter(silent))))
        for place in silent:
            ranks[place].hangs(report)
    return bool(silent)


def _late(ranks: Sequence[LocalRank], stopped: Mapping[int, int], finish: float) -> list[tuple[LocalRank, str]]:
    """Ranks that are not waited for any longer, each with why; `stopped` has looks at which a process was it."""
    running = [rank for rank in ranks if rank.process.exitcode is None]
    if time.monotonic() > finish:
        return [(rank, f"it had not ended {FINISH_SECONDS:g} s after the first of the ranks") for rank in running]
    why = "process {} is stopped by a signal, and ranks that were with it have finished"
    return [
        (rank, why.format(rank.process.pid))
        for rank in running
        if stopped.get(rank.process.pid or 0, 0) >= STOPPED_LOOKS
    ]


def _end(ranks: Sequence[LocalRank]) -> tuple[LocalRank, ...]:
    """End what still runs: kindly, then for sure. Returns ranks that did not end: they wait for a disk."""
    # In a run that hangs SIGTERM helps little: ranks that could react have left by themselves.
    hangs = any(rank.ending is not None and rank.ending.is_of_run for rank in ranks)
    _send(ranks, signal.SIGTERM)
    _join(ranks, HANG_LEAVE_SECONDS if hangs else LEAVE_SECONDS)
    _send(ranks, signal.SIGKILL)
    _join(ranks, KILL_SECONDS)
    stuck = tuple(rank for rank in ranks if rank.process.exitcode is None)
    for rank in stuck:  # what ends this process would wait for them
        multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]
    return stuck


def _join(ranks: Sequence[LocalRank], seconds: float) -> None:
    """Wait for ranks. Not by `join`: a process may have closed its sentinel, and wait for a disk before it ends."""
    deadline = time.monotonic() + seconds
    while any(rank.process.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(JOIN_SECONDS)


def _ended_later(stuck: Sequence[LocalRank], *, waits: bool) -> bool:
    """Say that ranks cannot be ended, and wait for them before a restart; whether they have ended."""
    names = ", ".join(f"rank {rank.place.rank} (process {rank.process.pid})" for rank in stuck[:4])
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    cannot = f"{names}{more} cannot be ended as long as the disk that it waits for does not answer"
    if not waits:
        say(f"{cannot}; it ends then, and a new start can follow")
        return False
    say(f"{cannot}; a restart waits for that, at most {STUCK_SECONDS:g} s")
    _join(stuck, STUCK_SECONDS)
    if any(rank.process.exitcode is None for rank in stuck):
        say("no restart: the disk does not answer; start again when it does")
        return False
    return True


def _tell(failed: Sequence[LocalRank], received: Sequence[int]) -> tuple[int, str]:
    """Print what the culprit has to say, and nothing else; the exit status of the run, and what was printed."""
    # 1. The first cause. The other failed ranks lost their peer, or were ended by the launcher.
    culprit = min(failed, key=lambda rank: _order(rank.ending))
    ending = culprit.ending
    code = culprit.process.exitcode or 0
    # 2. Not a failure: the rank died of a signal that came to the launcher and was sent on, before it could save.
    asked = next((signum for signum in received if _meaning(signum) == -code), None)
    if ending is None and asked is not None:
        sentence = f"stopped by {signal.Signals(asked).name} before it could save"
        say(sentence)
        return 128 + asked, sentence
    # 3. What a silent rank cannot say itself is derived from its exit code: below zero it is the number of a signal.
    status, message = (1, None) if ending is None else (ending.status, ending.message)
    if ending is None and culprit.late:
        message = culprit.late
    elif ending is None and code < 0:
        message = f"killed by {signal_name(-code)}{REASONS.get(-code, '')}"
    elif ending is None and code == 0:
        message = "it ended with status 0 before the run had finished"
    elif ending is None:
        message = f"it ended with status {code} and without a message"
    if not message:
        return status, ""
    is_of_run = ending is not None and ending.is_of_run
    origin = None if ending is None else ending.origin
    sentence = message if is_of_run else failure(culprit.place, message, origin=origin)
    say(sentence)
    return status, sentence


def _order(ending: Ending | None) -> tuple[int, float]:
    """Place among the suspects: reports about the run first, then ranks that said nothing, then the earliest."""
    if ending is None:
        return 1, 0.0
    return (0 if ending.is_of_run else 2), ending.seconds


def _send(ranks: Sequence[LocalRank], signum: int) -> None:
    for rank in ranks:
        if rank.process.exitcode is None and rank.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signum)


def _meaning(signum: int) -> int:
    """What a signal to the launcher means to the ranks: Ctrl-C asks them to save and leave, as SIGTERM does."""
    return signal.SIGTERM if signum == signal.SIGINT else signum


@contextlib.contextmanager
def _forwarded_signals(ranks: Sequence[LocalRank], *, ignores_interrupts: bool) -> Iterator[list[int]]:
    """Hand on to `ranks` what arrives here, and note it down; the second Ctrl-C kills them."""
    received: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        # Ctrl-C comes as SIGTERM to the ranks, which save and leave; who presses it again does not want to wait for
        # that.
        if received.count(signal.SIGINT) > 1:
            _send(ranks, signal.SIGKILL)
            return
        if signum == signal.SIGINT:
            say_at_once(INTERRUPTED)
        _send(ranks, _meaning(signum))

    # A job in the background of a shell ignores Ctrl-C and continues to.
    heard = [signum for signum in FORWARDED if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, forward) for signum in heard}
    # After `before` has noted the caller's handler, which comes back at the end.
    if ignores_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait while ranks are being born: none of them may run the launcher's handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
