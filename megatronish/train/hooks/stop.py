"""When does a run stop before its end, or save out of turn? Signals, --exit-interval, --exit-duration-in-mins.

Ranks must agree, so each step ends with one small all-reduce of what any of them wants. SIGTERM saves and leaves;
SIGUSR1 saves and goes on (SLURM can send it some minutes before a job's time is over).
"""

import signal
import time
from types import FrameType

import torch

from megatronish import comm
from megatronish.mesh import Axis
from megatronish.train.trainer import Hook, StepRecord, Trainer

REASONS = {
    1: "SIGTERM or Ctrl-C asked for it",
    2: "the time of --exit-duration-in-mins is over",
    3: "--exit-interval is reached",
}


class Stopper(Hook):
    """Decides for all ranks whether to stop, and whether to save now."""

    def __init__(self, world: Axis, *, exit_interval: int | None, exit_duration_in_mins: float | None) -> None:
        self.world, self.exit_interval = world, exit_interval
        self.deadline = None if exit_duration_in_mins is None else time.monotonic() + 60 * exit_duration_in_mins
        self.save_now = False
        self._terminated = self._save_asked = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGTERM:
            self._terminated = True
        else:
            self._save_asked = True

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Agree."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        leave = self.exit_interval is not None and record.step % self.exit_interval == 0
        reason = 1 if self._terminated else 2 if late else 3 if leave else 0
        wish = torch.tensor([reason, int(self._save_asked)])
        reason, save = comm.all_reduce(wish, self.world, "max").tolist()
        self._save_asked = False
        self.save_now = bool(save)
        if reason:
            trainer.stop_reason = REASONS[reason]
