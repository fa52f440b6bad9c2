"""Trackers: what a run sends its numbers to in addition to its own files, such as TensorBoard.

A tracker never ends a run. Only the main rank has trackers. Each works in a thread of its own, so that a library that
is slow to import, a network that is away or a full disk holds up no step. Whatever a tracker raises is printed in one
line, and the run continues without it.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from tqdm import tqdm

from megatronish.core.errors import without_passwords

LONGEST_WAIT = 30.0  # seconds, at the end of a run, for a tracker to send what it has


class RunDescription(NamedTuple):
    """RunDescription of a run for its trackers, without passwords.

    `first_step` is the number of steps done before this start.
    """

    name: str
    folder: Path
    first_step: int
    config: dict[str, dict[str, Any]]
    config_text: str
    first_lines: str


class Points(NamedTuple):
    """Values of one step by tag."""

    values: Mapping[str, float]
    step: int
    samples: int


class RunSummary(NamedTuple):
    """RunSummary of a run, or of this part of it: last values by tag, and how it ended."""

    values: Mapping[str, float]
    ending: str
    has_failed: bool


class Tracker:
    """Destination of a run's numbers. One thread calls `begin`, then `add` any number of times, then `end`."""

    title = ""

    def begin(self, run: RunDescription) -> str | None:
        """Open the destination; returns a line for the user."""

    def add(self, points: Sequence[Points]) -> None:
        """Send the points of some steps, in their order."""

    def end(self, summary: RunSummary) -> None:
        """Send the summary and close."""


class TrackerThread:
    """Thread of one tracker, and the messages that the main thread prints for it."""

    def __init__(self, tracker: Tracker, run: RunDescription) -> None:
        self.tracker = tracker
        self._waiting: SimpleQueue[Points | RunSummary] = SimpleQueue()
        self._line: str | None = None
        self._error: BaseException | None = None
        self._is_off = False
        self._thread = threading.Thread(target=self._work, args=(run,), name=tracker.title, daemon=True)
        self._thread.start()

    def add(self, points: Points) -> None:
        """Hand over the points of a step, unless the tracker has failed."""
        self._print_messages()
        if not self._is_off:
            self._waiting.put(points)

    def end(self, summary: RunSummary) -> None:
        """Ask the tracker to send what it has, and to close."""
        self._waiting.put(summary)

    def wait(self, seconds: float) -> None:
        """Wait until the tracker has closed, but no longer than `seconds`."""
        self._thread.join(seconds)
        self._print_messages()
        if self._thread.is_alive() and not self._is_off:
            tqdm.write(
                f"{self.tracker.title} did not finish in {LONGEST_WAIT:g} s and may lack the end of this run",
                file=sys.stderr,
            )

    def _work(self, run: RunDescription) -> None:
        try:
            self._line = self.tracker.begin(run)
            while True:
                batch: list[Points | RunSummary] = [self._waiting.get()]
                try:
                    while True:
                        batch.append(self._waiting.get_nowait())
                except Empty:
                    pass
                if points := [each for each in batch if isinstance(each, Points)]:
                    self.tracker.add(points)
                if isinstance(batch[-1], RunSummary):
                    self.tracker.end(batch[-1])
                    return
        except BaseException as error:  # libraries call sys.exit, too
            self._error = error

    def _print_messages(self) -> None:
        """Print what the thread has to say, in the main thread, between the lines of the run."""
        if self._line is not None:
            tqdm.write(f" {without_passwords(self._line)}", file=sys.stdout)
            self._line = None
        if self._error is not None and not self._is_off:
            self._is_off = True
            title, words = self.tracker.title, " ".join(without_passwords(str(self._error)).split())
            reason = words or type(self._error).__name__
            tqdm.write(f"{title} is off, and the run continues without it: {reason:.300}", file=sys.stderr)


class Trackers:
    """All trackers of a run; none on ranks other than the main one. Used as a context, which ends them."""

    def __init__(self, trackers: Sequence[Tracker], run: RunDescription | None = None) -> None:
        assert run is not None or not trackers
        self._threads = [TrackerThread(tracker, run) for tracker in trackers if run is not None]
        self._last: dict[str, float] = {}
        self.ending = "stopped"

    def add(self, values: Mapping[str, float], *, step: int, samples: int) -> None:
        """Send values by tag to every tracker."""
        self._last |= values
        for thread in self._threads:
            thread.add(Points(values, step, samples))

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = self.ending
        if error is not None:
            ending = f"failed: {without_passwords(str(error)).strip() or type(error).__name__}"
        for thread in self._threads:
            thread.end(RunSummary(self._last, ending, has_failed=error is not None))
        deadline = time.monotonic() + LONGEST_WAIT
        for thread in self._threads:
            thread.wait(max(0.0, deadline - time.monotonic()))


def kept_id(run: RunDescription, title: str) -> str | None:
    """Id under which an earlier start of this run is known to a tracker."""
    file = _id_file(run, title)
    return file.read_text().strip() or None if file.exists() else None


def keep_id(run: RunDescription, title: str, run_id: str) -> None:
    """Keep the id in the run folder, so that a resumed run continues there."""
    _id_file(run, title).write_text(f"{run_id}\n")


def _id_file(run: RunDescription, title: str) -> Path:
    return run.folder / f"{title}_run_id"


def flattened(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"section.field": value} of a resolved config."""
    return {f"{section}.{name}": value for section, fields in config.items() for name, value in fields.items()}
