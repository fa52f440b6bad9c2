"""The CopyNearby hook: copies of the state on this host and the next, so that a lost host loses at most N steps.

Training waits while its tensors are copied in memory. A thread writes and sends the copy meanwhile, and ranks learn
from the votes of a later step that it is whole everywhere. N bounds what is lost, so a copy starts as many steps early
as the last one took; training waits for it only if it takes longer than that. A copy that failed, as on a full disk, is
tried again after 1, 2, 4, ... steps.
"""

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from megatronish.checkpoint.replicated.copies import NearbyCopies
from megatronish.checkpoint.save import HostCopies, in_background
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.config import Config
from megatronish.core.remote import location
from megatronish.engine.engine import Engine
from megatronish.launch.os_errors import is_lost_rank
from megatronish.parallel.mesh import new_axis
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.hooks.save import Save
from megatronish.train.trainer import Hook, StepRecord, Trainer

WHOLE = "copied_nearby"
PATIENCE = 10.0
"""Seconds for a copy in progress when a run fails; a peer that is lost may keep it for longer."""


def open_copies(config: Config, engine: Engine) -> NearbyCopies | None:
    """Folders of --save-replicated-interval; None without it. Collective."""
    keep, world = config.checkpoint, engine.mesh.world
    if keep.save_replicated_interval is None:
        return None
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    groups = [world.ranks]
    axis = new_axis("copies", groups, rank=world.rank, timeout=timeout, backend="gloo", record=engine.mesh.record)
    tensors = tensors_of(engine, with_optimizer=True)
    return NearbyCopies.open(keep.local_save, save_place=location(config.save_place), tensors=tensors, axis=axis)


class PendingCopy(NamedTuple):
    """Copy that a thread is writing."""

    step: int
    future: Future[None]


class CopyNearby(Hook):
    """Copies such that the newest whole one is never more than `interval` steps old after a step.

    `check` is called before each copy: that ranks which should hold the same parameters do.
    """

    def __init__(
        self, copies: NearbyCopies, *, interval: int, save: Save, check: Callable[[Trainer], None] | None
    ) -> None:
        self.copies, self.interval, self.save, self.check = copies, interval, save, check
        self._buffers = HostCopies()
        self._pending: PendingCopy | None = None
        self._last = 0  # step of the last whole copy
        self._lead = 1  # steps that a copy takes
        self._failures, self._tried = 0, 0  # since that copy, and the step of the last try
        self._number, self._paused = 0, 0.0

    def start(self, trainer: Trainer) -> None:
        """Take the step that was loaded as kept."""
        self._last = trainer.progress.step

    def votes(self, step: int) -> dict[str, float]:
        """One if this rank has its part of the copy that is being written."""
        return {WHOLE: float(self._pending is not None and self._pending.future.done())}

    def decided(self, trainer: Trainer, sums: Mapping[str, float]) -> None:
        """Take note that a copy is whole, on all ranks after the same step."""
        if self._pending is not None and sums[WHOLE] == self.save.mesh.world.size:
            self._lead = max(1, trainer.progress.step - self._pending.step)
            self._collect()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Start a copy when it is time; wait for it where more steps would be lost without it."""
        start = time.perf_counter()
        if self._pending is None and record.step >= self._due:
            self._begin(trainer)
        if self._pending is not None and record.step >= self._last + self.interval:
            if self._pending.step < record.step:  # it took longer than expected
                self._lead = min(self.interval, self._lead + 1)
            self._collect()
        self._paused += time.perf_counter() - start

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Wait for the thread, unless the user wants to leave at once: what calls this run may continue after it."""
        if isinstance(error, Exception) and self._pending is not None:
            wait([self._pending.future], timeout=PATIENCE)

    def finish(self, trainer: Trainer) -> None:
        """Remove the copies of a run whose last checkpoint is written."""
        self._collect()
        if self.save.saved_step == trainer.progress.step:
            self.copies.remove()
            told = f"copied {self._number} times to {self.copies.nearby.folder}"
            self._tell(f" {told}; training paused for {self._paused:.2f} s in all", file=sys.stdout)

    @property
    def _due(self) -> int:
        """Step after which the next copy starts."""
        if self._failures:
            return self._tried + min(self.interval, 2 ** (self._failures - 1))
        return self._last + self.interval - self._lead

    @property
    def _after_failure(self) -> str:
        """What a copy that failed means, and what to do if others fail, too."""
        if self._failures == 1:
            return "The copy before it stays, training continues, and it is tried again soon"
        return (
            f"{self._failures} copies in a row have failed, and none is newer than step {self._last}: make room there, "
            "or start again with another --local-save"
        )

    def _begin(self, trainer: Trainer) -> None:
        if self.check is not None:
            self.check(trainer)
        step = trainer.progress.step
        try:  # what fails here has failed like a copy: the other ranks learn it as they learn of that
            state = self.save.run_state(trainer) | {"has_optimizer": True}
            tensors = self._buffers.of(tensors_of(trainer.engine, with_optimizer=True))
            future = in_background(partial(self._write, step, tensors, state))
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._pending = PendingCopy(step, future)

    def _write(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> None:
        """Write the copy, in a thread for which the watchdog looks, too."""
        with self.save.mesh.record.phase("save", f"the copy nearby of step {step}, in the background"):
            self.copies.write(step, tensors, state)

    def _collect(self) -> None:
        """Wait for the copy that a thread writes, if there is one, and report a failure."""
        if self._pending is None:
            return
        step, future = self._pending
        wait([future])
        self._pending, self._tried = None, step
        try:
            future.result()
        except Exception as error:
            self._failures += 1
            if is_lost_rank(error):
                self._tell(f"the copy nearby of step {step} is not whole: another rank has ended. The one before stays")
                return
            if self._failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: not a line at each interval
                self._tell(f"{error}. {self._after_failure}")
        else:
            if self._failures > 1:
                self._tell(f"the copy nearby of step {step} is whole again, after {self._failures} that failed")
            self._last, self._failures = step, 0
            self._number += 1

    def _tell(self, line: str, file: TextIO | None = None) -> None:
        if self.save.mesh.is_main:
            tqdm.write(line, file=sys.stderr if file is None else file)
