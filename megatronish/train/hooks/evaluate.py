"""The Evaluate hook: mean loss and perplexity on validation and test sets."""

import math
from collections.abc import Callable
from pathlib import Path

from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS
from megatronish.train.console import Console
from megatronish.train.engine import Engine
from megatronish.train.folder import add_line
from megatronish.train.trackers.tracker import Trackers
from megatronish.train.trainer import Hook, StepRecord, Trainer

BatchOf = Callable[[int], list[MicroBatch]]
"""This rank's micro-batches of evaluation batch number i."""


def mean_loss(engine: Engine, batch_of: BatchOf, num_batches: int) -> tuple[float, int]:
    """Mean loss over all predictions of `num_batches` global batches, and the number of these predictions."""
    total, tokens = 0.0, 0
    for i in range(num_batches):
        totals = engine.evaluate(batch_of(i))
        total += totals.sums[LOSS]
        tokens += totals.weight
    return total / max(tokens, 1), tokens


class Evaluate(Hook):
    """Evaluation every `interval` steps and at the end, always on the same samples."""

    phase = "evaluation"

    def __init__(
        self,
        valid: dict[str, BatchOf],
        test: BatchOf | None,
        *,
        interval: int,
        num_batches: int,
        file: Path | None,
        trackers: Trackers,
        console: Console,
    ) -> None:
        self.valid, self.test, self.trackers, self.console = valid, test, trackers, console
        self.interval, self.num_batches, self.file = interval, num_batches, file
        self.last_step = -1

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Evaluate at the interval."""
        if record.step % self.interval == 0:
            self._evaluate(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Evaluate at the end of the run, the test set too; not where the run is stopped before its end."""
        if trainer.progress.step < trainer.schedule.num_steps:
            return
        if self.last_step != trainer.progress.step:
            self._evaluate(trainer)
        if self.test is not None:
            self._one(trainer, "test", self.test)

    def _evaluate(self, trainer: Trainer) -> None:
        self.last_step = trainer.progress.step
        for name, batch_of in self.valid.items():
            self._one(trainer, name, batch_of)

    def _one(self, trainer: Trainer, name: str, batch_of: BatchOf) -> None:
        loss, tokens = mean_loss(trainer.engine, batch_of, self.num_batches)
        if self.file is None:
            return
        perplexity = math.exp(min(loss, 700.0))
        line = {
            "step": trainer.progress.step,
            "name": name,
            "loss": loss,
            "perplexity": perplexity,
            "tokens": tokens,
            "consumed_samples": trainer.progress.consumed_samples,
        }
        points = {f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity}
        self.trackers.add(points, step=trainer.progress.step, samples=trainer.progress.consumed_samples)
        add_line(self.file, line)
        self.console.evaluation(name=name, step=trainer.progress.step, loss=loss, perplexity=perplexity)
