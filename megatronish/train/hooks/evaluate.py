"""The Evaluate hook: loss, perplexity and what else an objective reports, on validation and test sets."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatronish.engine.engine import Engine
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Metrics, metrics_of
from megatronish.optim.outer import OuterOptimizer
from megatronish.report.metrics import Console, add_line
from megatronish.report.trackers.tracker import Trackers
from megatronish.train.trainer import Hook, StepRecord, Trainer

BatchOf = Callable[[int], list[MicroBatch]]
"""This rank's micro-batches of evaluation batch number i."""


def mean_metrics(engine: Engine, batch_of: BatchOf, num_batches: int) -> tuple[Metrics, int]:
    """What the objective reports of `num_batches` global batches, "loss" among it, and what its sums are divided by.

    That is the number of predictions, or of pairs of completions.
    """
    total, weight = Counter[str](), 0
    with outer_parameters(engine):
        for i in range(num_batches):
            totals = engine.evaluate(batch_of(i))
            total.update(totals.objective)
            weight += totals.weight
    return metrics_of(engine.objective, total, weight=weight), weight


@contextmanager
def outer_parameters(engine: Engine) -> Iterator[None]:
    """Context in which the model of all islands (DiLoCo) is that of the last outer step; then each has its own again.

    Without an outer optimizer there is one model in any case.
    """
    if engine.outer is None:
        yield
        return
    _exchange(engine, engine.outer)
    try:
        yield
    finally:
        _exchange(engine, engine.outer)


def _exchange(engine: Engine, outer: OuterOptimizer) -> None:
    engine.data_parallel.wait_for_parameters()
    outer.exchange()
    engine.data_parallel.gather_parameters()


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
        metrics, weight = mean_metrics(trainer.engine, batch_of, self.num_batches)
        if self.file is None:
            return
        loss = metrics.pop(LOSS)
        perplexity = math.exp(min(loss, 700.0))
        line = {
            "step": trainer.progress.step,
            "name": name,
            "loss": loss,
            "perplexity": perplexity,
            "tokens": weight,
            "consumed_samples": trainer.progress.consumed_samples,
            **metrics,
        }
        points = {f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity}
        points |= {f"{metric} {name}": value for metric, value in metrics.items()}
        self.trackers.add(points, step=trainer.progress.step, samples=trainer.progress.consumed_samples)
        add_line(self.file, line)
        self.console.evaluation(name=name, step=trainer.progress.step, loss=loss, perplexity=perplexity, others=metrics)
