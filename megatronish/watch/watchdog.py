"""Watchdog of one rank: a thread that tells the other ranks what this one does, and ends the run when it hangs.

Each rank puts beats on the board. A rank that has made no progress for half of its limit reads the beats of all. At the
limit it asks for the verdict; the first rank to claim the report writes it, and every rank leaves with it and status 1,
so that whoever started the run can start it again. That is before torch's timeout, and on every backend.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from megatronish.core.layout import Layout
from megatronish.launch.pulse import STACKS_SIGNAL, Pulse, Pulses, memory_file
from megatronish.watch.hang_diagnosis import Culprit, RanksSeen, RankWords, different, verdict
from megatronish.watch.heartbeat import REPORT, Beat, Board, ThreadBeat, bare_beat, beat_of
from megatronish.watch.observer import MAIN, HangLimits, Observer, birth_of
from megatronish.watch.record import RankRecord
from megatronish.watch.shared_ring import SharedRing, read_ring

SHORTEST, LONGEST = 0.1, 1.0  # seconds between two beats
SILENT_AFTER = 10.0  # seconds without a beat, or 0.4 of the limit if that is less
PATIENCE = 3.0  # for the report of another rank that has claimed it
KEEP_SECONDS = 0.6  # for the files of a report: the disk may be what hangs

FLAGS = {
    "start": "--hang-seconds-start",
    "evaluation": "--hang-seconds-evaluation",
    "save": "--hang-seconds-save",
    "end": "--hang-seconds-save",
}
"""Flags of the limits, by phase; those of the others have --hang-seconds."""

Leave = Callable[[str, bool], None]
"""Ends this process with a report, which this rank prints for all or not (`launch.place.Place.leave`)."""


class Watchdog:
    """Watchdog of the rank `rank`, over a `board` that all ranks see. Used as a context, by the thread that trains.

    `leave` ends this process with the report; `on_report` is called before that, once, with the report and the beats of
    all ranks, to keep them.
    """

    def __init__(
        self,
        record: RankRecord,
        limits: HangLimits,
        layout: Layout,
        *,
        rank: int,
        leave: Leave,
        on_report: Callable[[str, Mapping[int, Beat]], None] = lambda _report, _beats: None,
    ) -> None:
        self.record, self.limits, self.layout, self.rank = record, limits, layout, rank
        self._leave, self._on_report = leave, on_report
        self._observer = Observer(record, limits, rank=rank, main=threading.get_ident())
        self._words = RankWords(layout, host=self._observer.host)
        self._board: Board | None = None
        self._kept_by = ""
        self._rings: Path | None = None
        self._pulses: Pulses | None = None
        self._slot, self._trace = 0, -1
        self._pulsed = 0.0  # the limit of the last pulse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._newest: dict[int, tuple[Beat, float]] = {}  # beats of all ranks, and when each was new here

    def __enter__(self) -> "Watchdog":
        self._pulse(self._observer.look())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * LONGEST)
        with contextlib.suppress(Exception):
            self._put(ended="ended with status 0" if kind is None else "failed")
        if self._trace >= 0:
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(self._trace)
            self._trace = -1

    def pulse_to(self, pulses: Pulses, place: int) -> None:
        """Leave pulses there for a guard, which speaks where this process cannot. Before it is entered; Linux alone.

        With stacks if this is called in the main thread. OSError where no file can have them: pulses come without.
        """
        self._pulses, self._slot = pulses, place
        if threading.current_thread() is threading.main_thread():
            trace = memory_file("stacks")
            if signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
                signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # again after this watchdog: a late one ends no process
            self._trace = trace
            faulthandler.register(STACKS_SIGNAL, file=self._trace, all_threads=False)

    def share(self, board: Board, *, kept_by: str = "") -> None:
        """Exchange beats with the other ranks from now on; `kept_by` is the process without which none could."""
        self._board, self._kept_by = board, kept_by

    def share_ring(self, folder: Path) -> None:
        """Keep the last collectives of this rank in a folder that the ranks of this machine share, if that has room."""
        with contextlib.suppress(OSError):  # a run that does not fail never needs it
            self.record.shared = SharedRing(folder / f"ring_{self.rank}")
            self._rings = folder

    def end_if_different(self) -> None:
        """After a failure: end this rank with a report if the ranks of this machine made different collectives."""
        if self._rings is None or self.layout.world_size == 1:
            return
        rings = {rank: read_ring(self._rings / f"ring_{rank}", rank) for rank in range(self.layout.world_size)}
        beats = {rank: bare_beat(rank, recent) for rank, recent in rings.items() if recent}
        seen = RanksSeen(self.layout.world_size, beats)
        if culprits := different(seen):
            report = f"the run failed: {self._words.report(culprits, seen)}"
            self._end(report, {}, prints=self._board is None or self._board.claim(REPORT))

    @property
    def _interval(self) -> float:
        return min(LONGEST, max(SHORTEST, (self.limits.step or LONGEST * 10) / 10))

    @property
    def _limit_of_step(self) -> float:
        return self.limits.of_phase("step", median_step=self.record.median_step)

    def _watch(self) -> None:
        wait = SHORTEST
        while not self._stop.wait(wait):
            try:
                is_idle, is_without_board = self._look(), self._board is None
                # The first beat follows at once when there is a board: a rank without one seems not to have come. And
                # a guard, which believes the limit of the last pulse, gets that of a step soon after the start's.
                is_early = is_without_board and (self.layout.world_size > 1 or self._pulsed > self._limit_of_step)
                wait = SHORTEST if is_idle or is_early else self._interval
            except Exception:  # a board that fails must not end a run that does not hang
                self._alone()

    def _put(self, *, recent: bool = False, ended: str = "") -> Beat:
        beat = self._observer.look(recent=recent, ended=ended)
        self._pulse(beat)
        if self._board is not None:
            self._board.put(f"rank_{self.rank}", beat.to_json())
        return beat

    def _pulse(self, beat: Beat) -> None:
        main = beat.thread(MAIN)
        if self._pulses is None or main is None:
            return
        pulse = Pulse(
            number=beat.number,
            pid=beat.pid,
            who=self._words.rank(self.rank),
            seen=self._words.seen(main, beat),
            limit=main.limit,
            flag=FLAGS.get(main.phase, "--hang-seconds"),
            trace=self._trace,
            ended=bool(beat.ended),
        )
        self._pulses.put(self._slot, pulse)
        self._pulsed = pulse.limit

    def _look(self) -> bool:
        """One round: a beat, and what follows from it. Returns whether this rank makes no progress for some time."""
        recent = any(thread.idle > thread.limit / 2 for thread in self._observer.look().threads)
        beat = self._put(recent=recent)
        if self._board is not None and (report := self._board.get(REPORT)) is not None:
            self._end(report, {}, prints=False)
        if not recent:
            return False
        self._read(beat)
        overdue = next((thread for thread in beat.threads if thread.is_overdue), None)
        if overdue is not None:
            seen = self._seen(overdue.limit)
            if culprits := verdict(seen, thread=overdue.name):
                self._report(culprits, seen, overdue)
        return True

    def _read(self, mine: Beat) -> None:
        now = self._observer.clock
        self._newest[self.rank] = mine, now
        if (board := self._board) is None:
            return
        for rank in range(self.layout.world_size):
            if rank == self.rank or (text := board.get(f"rank_{rank}")) is None:
                continue
            beat = beat_of(text)
            known = self._newest.get(rank)
            if known is None or known[0].number != beat.number:
                self._newest[rank] = beat, now

    def _seen(self, limit: float) -> RanksSeen:
        now, silent_after = self._observer.clock, min(SILENT_AFTER, 0.4 * limit)
        silent = {
            rank: now - since
            for rank, (beat, since) in self._newest.items()
            if rank != self.rank and now - since > silent_after and not beat.ended
        }
        return RanksSeen(self.layout.world_size, {rank: beat for rank, (beat, _) in self._newest.items()}, silent)

    def _report(self, culprits: Sequence[Culprit], seen: RanksSeen, overdue: ThreadBeat) -> None:
        report = f"the run hangs: {self._words.report(culprits, seen)}"
        flag = FLAGS.get(overdue.phase, "--hang-seconds")
        report += f"\n(a rank may make no progress for {overdue.limit:g} s here: {flag})"
        prints = self._board is None or self._board.claim(REPORT)
        if self._board is not None and prints:
            self._board.put(REPORT, report)
        elif not prints:
            report = self._report_of_another() or report
        self._end(report, seen.beats, prints=prints, culprits=culprits)

    def _report_of_another(self) -> str | None:
        deadline = time.monotonic() + PATIENCE
        assert self._board is not None
        while (report := self._board.get(REPORT)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return report

    def _alone(self) -> None:
        """A round without the board: what is known is this rank's own state, and who keeps the board."""
        beat = self._observer.look()
        overdue = next((thread for thread in beat.threads if thread.is_overdue), None)
        if overdue is not None:
            report = f"the run hangs: {self._words.without_others(self.rank, overdue, beat, kept_by=self._kept_by)}"
            self._end(report, {self.rank: beat}, prints=True)

    def _end(self, report: str, beats: Mapping[int, Beat], *, prints: bool, culprits: Sequence[Culprit] = ()) -> None:
        if self._stop.is_set():
            return
        keeping = threading.Thread(target=self._on_report, args=(report, beats if prints else {}), daemon=True)
        keeping.start()
        pause = 0.0 if self.rank == 0 else self._interval + 2 * SHORTEST
        time.sleep(pause)  # rank 0 speaks for all, and must not complain of lost peers first
        keeping.join(timeout=max(0.0, KEEP_SECONDS - pause))
        for culprit in culprits if prints else ():
            if culprit.kind == "silent":
                self._kill(beats[culprit.rank])
        self._leave(report, prints)

    def _kill(self, beat: Beat) -> None:
        """End a silent process of this machine: stopped, it would ignore SIGTERM, for which launchers wait long."""
        if beat.host == self._observer.host and beat.born and (birth_of(beat.pid) or "").startswith(f"{beat.born} "):
            with contextlib.suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)
