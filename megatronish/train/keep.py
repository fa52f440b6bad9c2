"""When is a run saved, and how does it go on from what was saved?"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatronish.checkpoint.folder import DamagedError, read_state
from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import model_tensors, optimizer_tensors, save_checkpoint
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.errors import UserError
from megatronish.train.engine import Engine
from megatronish.train.stop import Stopper
from megatronish.train.trainer import Hook, Progress, StepRecord, Trainer

FACTS = ("config", "vocab_size", "data", "eod")
POSITION = ("step", "consumed_samples", "optimizer_steps")


class Save(Hook):
    """Saves every `interval` steps, when asked to, and at the end."""

    def __init__(
        self, folder: Path, *, interval: int | None, stopper: Stopper, with_optimizer: bool, facts: dict[str, Any]
    ) -> None:
        self.folder, self.interval, self.stopper = folder, interval, stopper
        self.with_optimizer, self.facts = with_optimizer, facts
        self.saved_step: int | None = None

    def start(self, trainer: Trainer) -> None:
        """What was loaded need not be saved again."""
        self.saved_step = trainer.progress.step

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """In turn, or because somebody asked."""
        due = self.interval is not None and record.step % self.interval == 0
        if due or self.stopper.save_now:
            self._save(trainer)

    def finish(self, trainer: Trainer) -> None:
        """The end of the run, or of this part of it."""
        if self.saved_step != trainer.progress.step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        engine, progress = trainer.engine, trainer.progress
        start = time.perf_counter()
        tensors = tensors_of(engine, with_optimizer=self.with_optimizer)
        state = self.facts | {
            "consumed_samples": progress.consumed_samples,
            "optimizer_steps": engine.optimizer.num_steps,
            "has_optimizer": self.with_optimizer,
            "skipped_steps": progress.skipped_steps,
            "skipped_samples": progress.skipped_samples,
            "loss_scale": engine.loss_scale.state(),
        }
        path = save_checkpoint(self.folder, step=progress.step, tensors=tensors, state=state, mesh=engine.mesh)
        self.saved_step = progress.step
        if engine.mesh.is_main:
            tqdm.write(f" saved {path} in {time.perf_counter() - start:.1f} s")


def tensors_of(engine: Engine, *, with_optimizer: bool) -> dict[str, GlobalTensor]:
    """What a checkpoint holds of this rank."""
    sharing = engine.data_parallel
    where = (engine.shardings, engine.mesh, sharing.copied_over)
    tensors = model_tensors(sharing.shards, *where)
    return tensors | (optimizer_tensors(engine.optimizer, *where) if with_optimizer else {})


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
        raise DamagedError(checkpoint, f"state.json lacks {', '.join(missing)}")
    return state


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
    state = read_run(checkpoint)
    check(state)
    optimizer = engine.optimizer
    with_optimizer = with_optimizer and not weights_only
    if with_optimizer:
        _refuse_other_optimizer(checkpoint, state["config"].get("optimizer", {}).get("optimizer"), engine)
    load_tensors(checkpoint, tensors_of(engine, with_optimizer=with_optimizer), mesh=engine.mesh)
    engine.data_parallel.publish(frozen=True)
    if weights_only:
        return Progress()
    if with_optimizer:
        optimizer.num_steps = state["optimizer_steps"]
    engine.loss_scale.load(state.get("loss_scale", {}))
    return Progress(
        state["step"], state["consumed_samples"], state.get("skipped_steps", 0), state.get("skipped_samples", 0)
    )
