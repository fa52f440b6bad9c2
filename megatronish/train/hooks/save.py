"""When is a run saved, and how does it go on from what was saved?"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megatronish.checkpoint.all_or_none import all_or_none
from megatronish.checkpoint.background import HostCopies, in_background
from megatronish.checkpoint.folder import STATE, DamagedError, read_state, remove_old
from megatronish.checkpoint.load import load_tensors, offering_another
from megatronish.checkpoint.save import SaveError, model_tensors, optimizer_tensors, save_checkpoint
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.run import CheckpointConfig
from megatronish.errors import UserError
from megatronish.mesh import Mesh
from megatronish.train.engine import Engine
from megatronish.train.hooks.stop import Stopper
from megatronish.train.trainer import Hook, Progress, StepRecord, Trainer

FACTS = ("config", "vocab_size", "data", "eod")
POSITION = ("step", "consumed_samples", "optimizer_steps")
LOSS_SCALE = {"scale", "growth_tracker", "hysteresis_tracker"}
LARGEST_COUNT = 2**62
TRIED_AGAIN = "training goes on, and the next save tries again"


class FinishedSave(NamedTuple):
    """What became of a save: where it is, how long it took, and old ones that could not be removed."""

    path: Path
    seconds: float
    complaints: list[str]


class PendingSave(NamedTuple):
    """A save that a thread is writing."""

    step: int
    stood_still: float
    future: Future[FinishedSave]


class Save(Hook):
    """Saves every `interval` steps, when asked to, and at the end.

    With `async_save` a thread writes all but the last, one at a time. A write that fails is told, and the next save
    tries again; the last is waited for, and its failure is the run's. Used as a context: what is being written when a
    run fails is written to its end, unless the user wants to leave at once.
    """

    def __init__(
        self, folder: Path, *, config: CheckpointConfig, mesh: Mesh, stopper: Stopper, facts: dict[str, Any]
    ) -> None:
        self.folder, self.config, self.mesh, self.stopper, self.facts = folder, config, mesh, stopper, facts
        self.saved_step: int | None = None
        self._copies = HostCopies()
        self._pending: PendingSave | None = None

    def start(self, trainer: Trainer) -> None:
        """What was loaded need not be saved again."""
        self.saved_step = trainer.progress.step

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """In turn, or because somebody asked."""
        if not self.is_writing:
            self._collect()
        interval = self.config.save_interval
        due = interval is not None and record.step % interval == 0
        if due or self.stopper.save_now:
            self._save(trainer)

    def finish(self, trainer: Trainer) -> None:
        """The end of the run, or of this part of it."""
        self._wait(then="it is tried once more")
        if self.saved_step != trainer.progress.step:
            self._save_now(trainer)

    @property
    def is_writing(self) -> bool:
        """Whether a thread is at work."""
        return self._pending is not None and not self._pending.future.done()

    def __enter__(self) -> "Save":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._collect(then="the run has failed otherwise")

    def _save(self, trainer: Trainer) -> None:
        if not self.config.async_save:
            self._save_now(trainer)
            return
        self._wait()
        start = time.perf_counter()
        copies = self._copies.of(self._tensors(trainer))
        step = trainer.progress.step
        work = partial(self._write, step, copies, self._state(trainer))
        self._pending = PendingSave(step, time.perf_counter() - start, in_background(work))

    def _save_now(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        written = self._write(step, self._tensors(trainer), self._state(trainer))
        self.saved_step = step
        self._tell(f" saved {written.path} in {written.seconds:.1f} s", *written.complaints)

    def _wait(self, then: str = TRIED_AGAIN) -> None:
        """Until nothing is being written."""
        if self._pending is None:
            return
        step, start = self._pending.step, time.perf_counter()
        wait([self._pending.future])
        seconds = time.perf_counter() - start
        self._collect(then)
        if seconds >= 0.5:
            self._tell(f" waited {seconds:.1f} s for the checkpoint of step {step} to be written")

    def _collect(self, then: str = TRIED_AGAIN) -> None:
        """Take what became of the save that a thread was writing, and tell it."""
        if self._pending is None:
            return
        step, stood_still, future = self._pending
        self._pending = None
        try:
            path, seconds, complaints = future.result()
        except Exception as error:
            what = error.what if isinstance(error, SaveError) else f"the checkpoint of step {step} failed: {error}"
            self._tell(f"{what}. Those before it are whole; {then}")
            return
        self.saved_step = step
        told = f" saved {path} in {seconds:.1f} s beside training, which stood still for {stood_still:.2f} s"
        self._tell(told, *complaints)

    def _write(self, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any]) -> FinishedSave:
        """On all ranks; perhaps in a thread, which may touch nothing of training's."""
        start = time.perf_counter()
        path = save_checkpoint(self.folder, step=step, tensors=tensors, state=state, mesh=self.mesh)
        complaints = []
        if self.mesh.is_main:
            keep = {"keep_last": self.config.keep_last, "keep_every": self.config.keep_every}
            complaints = remove_old(self.folder, **keep)
        return FinishedSave(path, time.perf_counter() - start, complaints)

    def _tensors(self, trainer: Trainer) -> dict[str, GlobalTensor]:
        return tensors_of(trainer.engine, with_optimizer=not self.config.no_save_optim)

    def _state(self, trainer: Trainer) -> dict[str, Any]:
        engine, progress = trainer.engine, trainer.progress
        return self.facts | {
            "consumed_samples": progress.consumed_samples,
            "optimizer_steps": engine.optimizer.num_steps,
            "has_optimizer": not self.config.no_save_optim,
            "skipped_steps": progress.skipped_steps,
            "skipped_samples": progress.skipped_samples,
            "loss_scale": engine.loss_scale.state(),
        }

    def _tell(self, *lines: str) -> None:
        """What is news to the user; complaints do not begin with a blank."""
        for line in lines if self.mesh.is_main else ():
            tqdm.write(line, file=sys.stdout if line.startswith(" ") else sys.stderr)


def tensors_of(engine: Engine, *, with_optimizer: bool) -> dict[str, GlobalTensor]:
    """What a checkpoint holds of this rank."""
    tensors = model_tensors(engine.data_parallel.shards, engine.shardings, engine.mesh.domains)
    return tensors | (
        optimizer_tensors(engine.optimizer, engine.shardings, engine.mesh.domains) if with_optimizer else {}
    )


def _refuse_other_optimizer(checkpoint: Path, saved: str | None, engine: Engine) -> None:
    """Its states are of no use to another one."""
    now = engine.optimizer.name
    if saved not in (None, now):
        raise UserError(
            f"{checkpoint} was written with optimizer={saved}, and this run has optimizer={now}; go on with "
            f"--optimizer {saved}, or add --no-load-optim, which keeps the weights and lets the optimizer start anew"
        )


def read_run(checkpoint: Path) -> dict[str, Any]:
    """The state of a run's checkpoint; DamagedError if it is not that of a run."""
    state = read_state(checkpoint)
    missing = [name for name in (*FACTS, *POSITION) if name not in state]
    if missing:
        raise DamagedError(checkpoint, f"{STATE} lacks {', '.join(missing)}")
    if not _is_sound(state):
        raise DamagedError(checkpoint, f"{STATE} is not that of a run")
    return state


def _is_sound(state: dict[str, Any]) -> bool:
    """Whether what a run goes on with is of the kind that a run leaves, and no number is out of all reason."""
    config, scale = state["config"], state.get("loss_scale", {})
    counts = [state.get(name, 0) for name in (*POSITION, "skipped_steps", "skipped_samples")]
    return (
        isinstance(config, dict)
        and all(isinstance(section, dict) for section in config.values())
        and "model" in config
        and type(config.get("training", {}).get("seq_length")) is int
        and all(type(count) is int and 0 <= count < LARGEST_COUNT for count in counts)
        and isinstance(scale, dict)
        and (not scale or scale.keys() >= LOSS_SCALE)
        and all(type(number) in (int, float) and abs(number) < LARGEST_COUNT**2 for number in scale.values())
        and isinstance(state.get("origin", {}), dict)
    )


def resume(
    engine: Engine,
    *,
    checkpoint: Path,
    weights_only: bool,
    with_optimizer: bool,
    check: Callable[[dict[str, Any]], None],
) -> Progress:
    """Load this rank's share, in whatever layout it was saved; where the run then stands.

    `check` is shown the checkpoint's state before anything is changed, and raises UserError if it will not do.
    """
    mesh, optimizer = engine.mesh, engine.optimizer
    with_optimizer = with_optimizer and not weights_only
    with offering_another(mesh.checkpoint_axis):
        state = all_or_none(mesh.checkpoint_axis, partial(read_run, checkpoint))
    check(state)
    if with_optimizer:
        _refuse_other_optimizer(checkpoint, state["config"].get("optimizer", {}).get("optimizer"), engine)
    load_tensors(checkpoint, tensors_of(engine, with_optimizer=with_optimizer), mesh=mesh)
    engine.data_parallel.gather_parameters(frozen=True)
    if weights_only:
        return Progress()
    if with_optimizer:
        optimizer.num_steps = state["optimizer_steps"]
    engine.loss_scale.load(state.get("loss_scale", {}))
    return Progress(
        state["step"], state["consumed_samples"], state.get("skipped_steps", 0), state.get("skipped_samples", 0)
    )
