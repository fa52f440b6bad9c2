"""What happens in a training run, step after step? A short loop; everything that watches it is a hook.

A hook is told of the start, of every step and of the end. It may look at all and change nothing but `stop_reason`.
Hooks run in their order: those that decide whether to stop come before the one that saves.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatronish.data.loader import Prefetcher
from megatronish.model.batch import MicroBatch
from megatronish.optim.batch_size import BatchSizeSchedule
from megatronish.optim.learning_rate import LearningRateSchedule
from megatronish.train.engine import Engine


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0  # of them: their gradient overflowed, and they changed no parameter
    skipped_samples: int = 0  # what those consumed: the learning rate stands still over them, as in Megatron-LM


@dataclass(frozen=True)
class StepRecord:
    """What a step showed. `seconds` is the update alone: no data, no saving, no evaluation.

    `loss_scale` is what its loss was multiplied by before the backward; `skipped` if its gradient overflowed.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    global_batch_size: int
    consumed_samples: int
    seconds: float
    loss_scale: float = 1.0
    skipped: bool = False


class Hook:
    """Something that watches a run. All ranks call their hooks in the same order, so a hook may communicate."""

    def start(self, trainer: "Trainer") -> None:
        """Before the first step."""

    def after_step(self, trainer: "Trainer", record: StepRecord) -> None:
        """After every step."""

    def finish(self, trainer: "Trainer") -> None:
        """After the last step."""


@dataclass
class Trainer:
    """A run on one rank. `prepare(consumed_samples, global_batch_size)` makes the micro-batches of a step."""

    engine: Engine
    schedule: LearningRateSchedule
    batch_sizes: BatchSizeSchedule
    num_steps: int
    prepare: Callable[[int, int], list[MicroBatch]]
    num_ahead: int
    hooks: Sequence[Hook]
    progress: Progress
    stop_reason: str | None = None

    def run(self) -> None:
        """Train from where `progress` stands until the end, or until a hook says to stop."""
        for hook in self.hooks:
            hook.start(self)
        batches = Prefetcher(
            self.prepare,
            consumed_samples=self.progress.consumed_samples,
            global_batch_size=self.batch_sizes.at,
            num_ahead=self.num_ahead,
        )
        with batches:
            while self.progress.step < self.num_steps and self.stop_reason is None:
                record = self.step(next(batches))
                for hook in self.hooks:
                    hook.after_step(self, record)
        for hook in self.hooks:
            hook.finish(self)

    def step(self, micro_batches: list[MicroBatch]) -> StepRecord:
        """One step from its micro-batches."""
        consumed = self.progress.consumed_samples
        learned_from = consumed - self.progress.skipped_samples
        learning_rate = self.schedule.learning_rate(learned_from)
        start = time.perf_counter()
        result = self.engine.step(
            micro_batches,
            step=self.progress.step,
            learning_rate=learning_rate,
            weight_decay=self.schedule.weight_decay(learned_from),
        )
        seconds = time.perf_counter() - start
        size = self.batch_sizes.at(consumed)
        before = self.progress
        self.progress = Progress(
            before.step + 1,
            consumed + size,
            before.skipped_steps + result.skipped,
            before.skipped_samples + size * result.skipped,
        )
        return StepRecord(
            step=self.progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            global_batch_size=size,
            consumed_samples=self.progress.consumed_samples,
            seconds=seconds,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
        )
