"""The LogExperts hook: tokens of each expert of each layer, into experts.jsonl and to the trackers."""

from pathlib import Path

from megatronish.config.sections.run import LogConfig
from megatronish.engine.balancing import ExpertLoad
from megatronish.report.metrics import EXPERTS_FILE
from megatronish.report.trackers.tracker import Trackers
from megatronish.train.folder import add_line
from megatronish.train.trainer import Hook, StepRecord, Trainer


class LogExperts(Hook):
    """A line of experts.jsonl for each of the log, {"step", "tokens_per_expert": {layer: [E]}}, on the main rank alone.

    A file of its own: a model of 48 layers with 128 experts has 6,144 counts a step, and metrics.jsonl stays a table.
    """

    is_observer = True

    def __init__(self, *, config: LogConfig, folder: Path | None, trackers: Trackers) -> None:
        self.config, self.trackers = config, trackers
        self.file = folder and folder / EXPERTS_FILE

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write the counts of the step, and send each layer's points, each at its own interval."""
        load = record.result.expert_load
        if load is None or self.file is None:
            return
        if record.step % self.config.log_interval == 0 or record.step == trainer.schedule.num_steps:
            add_line(self.file, {"step": record.step, "tokens_per_expert": load.by_layer()})
        if record.step % self.config.tensorboard_log_interval == 0:
            self.trackers.add(layer_points(load), step=record.step, samples=record.consumed_samples)


def layer_points(load: ExpertLoad) -> dict[str, float]:
    """Points of trackers: the largest load and the idle experts of each layer."""
    points: dict[str, float] = {}
    for layer, largest, num_idle in zip(load.layers, load.largest_of_layers, load.idle_of_layers, strict=True):
        points[f"moe/largest_expert_load_layer_{layer}"] = largest
        points[f"moe/idle_experts_layer_{layer}"] = float(num_idle)
    return points
