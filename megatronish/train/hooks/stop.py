"""The Stopper hook: early stop and saves on request, by signals, time, steps and a file.

SIGTERM and the signal of --exit-signal save and leave; SIGUSR1, unless it is that signal, saves and continues (SLURM
can send it some minutes before a job's time is over). Ranks must agree: each votes, and what any of them wants is done
by all.
"""

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from megatronish.train.trainer import Hook, Trainer

SAVE = "save_on_signal"
REASONS = {
    "stop_on_signal": "SIGTERM or Ctrl-C asked for it",
    "stop_on_time": "the time of --exit-duration-in-mins is over",
    "stop_on_interval": "--exit-interval is reached",
    "stop_on_file": "the file of --kill-switch-path exists",
}
"""Names of votes to stop, and what is reported; of several the first."""


class Stopper(Hook):
    """Decision of all ranks whether to stop, and whether to save now."""

    def __init__(
        self,
        *,
        exit_interval: int | None,
        exit_duration_in_mins: float | None,
        exit_signal: str = "SIGTERM",
        kill_switch: Path | None = None,
        launched: float | None = None,
    ) -> None:
        self.exit_interval = exit_interval
        begin = time.monotonic() if launched is None else launched  # of a launcher that starts again, its own start
        self.deadline = None if exit_duration_in_mins is None else begin + 60 * exit_duration_in_mins
        self.kill_switch = kill_switch
        self.save_now = False
        self._terminated = self._save_asked = False
        self._leave_on = {signal.SIGTERM, signal.Signals[exit_signal]}
        if threading.current_thread() is threading.main_thread():  # Python gives signals to no other
            for signum in {signal.SIGUSR1, *self._leave_on}:
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if signum in self._leave_on:
            self._terminated = True
        else:
            self._save_asked = True

    def votes(self, step: int) -> dict[str, float]:
        """One for each thing that this rank wants after step `step`."""
        asked, self._save_asked = self._save_asked, False
        wishes = {
            "stop_on_signal": self._terminated,
            "stop_on_time": self.deadline is not None and time.monotonic() > self.deadline,
            "stop_on_interval": self.exit_interval is not None and step % self.exit_interval == 0,
            "stop_on_file": self.kill_switch is not None and self.kill_switch.exists(),
            SAVE: asked,
        }
        return {name: float(wish) for name, wish in wishes.items()}

    def decided(self, trainer: Trainer, sums: Mapping[str, float]) -> None:
        """Do what any rank wants; of several reasons to stop the first is reported."""
        self.save_now = sums[SAVE] > 0
        trainer.stop_reason = next((told for name, told in REASONS.items() if sums[name] > 0), trainer.stop_reason)
