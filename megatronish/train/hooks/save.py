"""The Save hook: checkpoints at an interval, on request and at the end of a run, written here or by a thread."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from megatronish.checkpoint.folder import remove_old
from megatronish.checkpoint.save import HostCopies, SaveError, in_background, save_checkpoint
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.sections.run import CheckpointConfig
from megatronish.core.remote import Location
from megatronish.engine.results import NotFiniteError
from megatronish.launch.os_errors import is_lost_rank
from megatronish.parallel.mesh import Mesh
from megatronish.train.checkpoint_state import num_not_finite, tensors_of
from megatronish.train.hooks.stop import Stopper
from megatronish.train.trainer import Hook, StepRecord, Trainer

TRIED_AGAIN = "training continues, and the next save tries again"


class FinishedSave(NamedTuple):
    """Save that is done: its folder, its time, and complaints about old checkpoints that could not be removed."""

    path: Location
    seconds: float
    complaints: list[str]


class PendingSave(NamedTuple):
    """Save that a thread is writing."""

    step: int
    stood_still: float
    future: Future[FinishedSave]


class Save(Hook):
    """Checkpoint every `interval` steps, on request and at the end, unless a parameter is infinite or not a number.

    With `async_save` a thread writes all except the last, one at a time. A failed write is reported, and the next save
    tries again; the last is waited for, and its failure is the run's. Used as a context: what is being written when a
    run fails is written to its end, unless the user wants to leave at once.
    """

    phase = "save"

    def __init__(
        self, folder: Location, *, config: CheckpointConfig, mesh: Mesh, stopper: Stopper, facts: dict[str, Any]
    ) -> None:
        self.folder, self.config, self.mesh, self.stopper, self.facts = folder, config, mesh, stopper, facts
        self.begins_on_disk = True
        self.taken_after = 0.0  # time of the newest state that there is, in seconds since 1970
        self.before_writing: Callable[[], object] = lambda: None
        self.saved_step: int | None = None
        self._refused_step: int | None = None  # whose parameters were not finite
        self._copies = HostCopies()
        self._pending: PendingSave | None = None

    def start(self, trainer: Trainer) -> None:
        """Take the step that was loaded as saved, unless it came from a copy nearby."""
        self.saved_step = trainer.progress.step if self.begins_on_disk else None

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Save at the interval, or because a signal asked for it."""
        if not self.is_writing:
            self._collect()
        interval = self.config.save_interval
        due = interval is not None and record.step % interval == 0
        if due or self.stopper.save_now:
            self._save(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Save at the end of the run, or of this part of it."""
        self._wait(then="it is tried once more")
        if trainer.progress.step not in (self.saved_step, self._refused_step) and self._is_finite(trainer):
            self._save_now(trainer)
        if trainer.progress.step == self._refused_step:
            raise NotFiniteError(
                f"the run ended with infinity or NaN in its parameters after step {trainer.progress.step}, and saved "
                f"nothing of that: {self._newest()}. Start again from there with a lower --lr"
            )

    def _newest(self) -> str:
        if self.saved_step is None:
            return "no checkpoint with numbers was saved in this part of the run"
        return f"the newest checkpoint is that of step {self.saved_step}"

    @property
    def is_writing(self) -> bool:
        """Whether a thread is writing a checkpoint."""
        return self._pending is not None and not self._pending.future.done()

    def __enter__(self) -> "Save":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._collect(then="the run has failed otherwise")

    def _is_finite(self, trainer: Trainer) -> bool:
        """Whether every parameter is finite; prints that nothing is saved if one is not. Collective.

        --no-check-for-nan-in-loss-and-grad lets a run compute NaN, and with --keep-last its checkpoints would remove
        those that a run can resume from.
        """
        number = num_not_finite(trainer.engine)
        if number:
            self._refused_step = trainer.progress.step
            self._tell(
                f"no checkpoint of step {trainer.progress.step}: {number} of the model's tensors hold infinity or NaN, "
                "and no run can resume from them. Those before it stay; start again from the newest of them with a "
                "lower --lr"
            )
        return number == 0

    def _save(self, trainer: Trainer) -> None:
        if not self._is_finite(trainer):
            return
        if not self.config.async_save:
            self._save_now(trainer)
            return
        self._wait()
        start = time.perf_counter()
        self.before_writing()
        copies = self._copies.of(self._tensors(trainer))
        step = trainer.progress.step
        work = partial(self._write_watched, step, copies, self.run_state(trainer))
        self._pending = PendingSave(step, time.perf_counter() - start, in_background(work))

    def _save_now(self, trainer: Trainer) -> None:
        self.before_writing()
        step = trainer.progress.step
        written = self._write(step, self._tensors(trainer), self.run_state(trainer))
        self.saved_step = step
        self._tell(f" saved {written.path} in {written.seconds:.1f} s", *written.complaints)

    def _wait(self, then: str = TRIED_AGAIN) -> None:
        """Wait until no thread is writing."""
        if self._pending is None:
            return
        step, start = self._pending.step, time.perf_counter()
        wait([self._pending.future])
        seconds = time.perf_counter() - start
        self._collect(then)
        if seconds >= 0.5:
            self._tell(f" waited {seconds:.1f} s for the checkpoint of step {step} to be written")

    def _collect(self, then: str = TRIED_AGAIN) -> None:
        """Print the result of the save that a thread was writing, if there is one."""
        if self._pending is None:
            return
        step, stood_still, future = self._pending
        self._pending = None
        try:
            path, seconds, complaints = future.result()
        except Exception as error:
            why = "is not whole: another rank has ended" if is_lost_rank(error) else f"failed: {error}"
            what = error.what if isinstance(error, SaveError) else f"the checkpoint of step {step} {why}"
            self._tell(f"{what}. Those before it are whole; {then}")
            return
        self.saved_step = step
        told = f" saved {path} in {seconds:.1f} s in the background; training paused for {stood_still:.2f} s"
        self._tell(told, *complaints)

    def _write_watched(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> FinishedSave:
        """`_write` in a thread, for which the watchdog looks too."""
        with self.mesh.record.phase("save", f"step {step}, in the background"):
            return self._write(step, tensors, state)

    def _write(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> FinishedSave:
        """Write a checkpoint. Collective. A thread may call it, with copies of the tensors."""
        start = time.perf_counter()
        parts: dict[str, Any] = {"step": step, "tensors": tensors, "state": state, "mesh": self.mesh}
        path = save_checkpoint(self.folder, **parts, makes_folder=False)
        complaints = []
        if self.mesh.is_main:
            keep = {"keep_last": self.config.keep_last, "keep_every": self.config.keep_every}
            complaints = remove_old(self.folder, **keep)
        return FinishedSave(path, time.perf_counter() - start, complaints)

    def _tensors(self, trainer: Trainer) -> dict[str, GlobalTensor]:
        return tensors_of(trainer.engine, with_optimizer=not self.config.no_save_optim)

    def run_state(self, trainer: Trainer) -> dict[str, Any]:
        """What state.json says of the run now. Its time is after that of every older state, whatever the clock says."""
        engine, progress = trainer.engine, trainer.progress
        self.taken_after = max(time.time(), self.taken_after + 0.001)
        return self.facts | {
            "taken_at": self.taken_after,
            "consumed_samples": progress.consumed_samples,
            "optimizer_steps": engine.optimizer.num_steps,
            "islands": None if engine.outer is None else engine.mesh.islands.size,
            "has_optimizer": not self.config.no_save_optim,
            "skipped_steps": progress.skipped_steps,
            "skipped_samples": progress.skipped_samples,
            "loss_scale": engine.rule.loss_scale.state(),
            "loss_spikes": engine.rule.spikes.state(),
            "hooks": trainer.hook_states(),
        }

    def _tell(self, *lines: str) -> None:
        """Print on the main rank: results to stdout, with a blank before them, complaints to stderr."""
        for line in lines if self.mesh.is_main else ():
            tqdm.write(line, file=sys.stdout if line.startswith(" ") else sys.stderr)
