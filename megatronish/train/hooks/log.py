"""The Log hook (console line, metrics.jsonl, points of trackers), LogExperts (counts of each expert), ProgressBar."""

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatronish.config.sections.run import LogConfig
from megatronish.core.aside import Aside
from megatronish.engine.balancing import WITHOUT_ROOM, ExpertLoad
from megatronish.report.metrics import EXPERTS_FILE, Console, Value, add_line, file_line, points
from megatronish.report.trackers.tracker import Trackers
from megatronish.train.trainer import Hook, StepRecord, Trainer


@dataclass(frozen=True)
class Speed:
    """Sizes that turn the seconds of a step into rates; None is one that is not known."""

    seq_length: int
    model_flops_per_token: float | None
    num_devices: int
    peak_tflops: float | None

    def rates(self, record: StepRecord) -> dict[str, float | None]:
        """tokens_per_second over all devices, model_tflops_per_device and mfu."""
        tokens_per_second = record.global_batch_size * self.seq_length / record.seconds
        flops = self.model_flops_per_token
        tflops = None if flops is None else tokens_per_second * flops / self.num_devices / 1e12
        return {
            "tokens_per_second": tokens_per_second,
            "model_tflops_per_device": tflops,
            "mfu": None if tflops is None or self.peak_tflops is None else tflops / self.peak_tflops,
        }


@dataclass
class Troubles:
    """Counts since the last console line, as in Megatron-LM: steps skipped, and steps whose loss is not a number.

    And rows of experts that found no room, in steps that were computed again.
    """

    skipped: int = 0
    nan: int = 0
    without_room: int = 0

    def add(self, record: StepRecord) -> None:
        """Count one step more."""
        self.skipped += record.result.skipped
        self.nan += not math.isfinite(record.result.loss)
        self.without_room += int(record.result.metrics.get(WITHOUT_ROOM, 0))


class Pace:
    """Mean wall time of the last steps, with data, evaluations and saves: an estimate of the time that is left."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=1001)

    def add_step(self) -> None:
        """Note that a step has ended now."""
        self._ends.append(time.monotonic())

    def seconds_for(self, num_steps: int) -> float | None:
        """Time of so many steps; None before the second step, as the first one takes longer than others."""
        if len(self._ends) < 2:
            return None
        return num_steps * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


class Log(Hook):
    """Log line every `interval` steps, on the main rank alone; the extras are computed by all ranks.

    A checkpoint keeps the counts since the last line, so that the first line after a resume counts what a run without
    a stop would have counted.
    """

    name = "log"

    def __init__(
        self,
        *,
        speed: Speed,
        config: LogConfig,
        file: Path | None,
        trackers: Trackers,
        console: Console,
        device: torch.device,
        extras: dict[str, Callable[[], float]],
    ) -> None:
        self.speed, self.config, self.file, self.trackers, self.console = speed, config, file, trackers, console
        self.device, self.extras = device, extras
        self._troubles, self._pace = Troubles(), Pace()
        self._aside = Aside("the log")

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Write the line of the step, and send its points, each at its own interval."""
        self._troubles.add(record)
        self._pace.add_step()
        is_logged = record.step % self.config.log_interval == 0 or record.step == trainer.schedule.num_steps
        is_tracked = record.step % self.config.tensorboard_log_interval == 0
        if not (is_logged or is_tracked):
            return
        # All ranks compute the extras, also for a log that has failed.
        extras = {name: compute() for name, compute in self.extras.items()}
        if not self._aside.is_off:
            with self._aside.guard():
                self._write(trainer, record, extras, is_logged=is_logged, is_tracked=is_tracked)

    def _write(
        self, trainer: Trainer, record: StepRecord, extras: dict[str, float], *, is_logged: bool, is_tracked: bool
    ) -> None:
        values = self._values(trainer, record, extras)
        if is_logged:
            if self.file is not None:
                finite = {name: _number(value) for name, value in values.items()}
                add_line(self.file, file_line(finite))
                self.console.step(values, trainer.schedule.num_steps)
            self._troubles = Troubles()
        if is_tracked:
            self.trackers.add(points(values) | self._memory_points(), step=record.step, samples=record.consumed_samples)

    def _values(self, trainer: Trainer, record: StepRecord, extras: dict[str, float]) -> dict[str, Value]:
        """All values of a step by name, in the order of metrics.jsonl."""
        result, rates = record.result, record.learning_rates
        further = {"decoupled_learning_rate": rates.decoupled, "momentum": rates.momentum}
        return {
            "step": record.step,
            **result.metrics,
            **({WITHOUT_ROOM: self._troubles.without_room} if self._troubles.without_room else {}),
            "grad_norm": result.grad_norm,
            "learning_rate": record.learning_rate,
            **{name: value for name, value in further.items() if value is not None},
            "loss_scale": result.loss_scale,
            "skipped_iterations": trainer.progress.skipped_steps,
            "tokens": record.consumed_samples * self.speed.seq_length,
            "consumed_samples": record.consumed_samples,
            "step_seconds": record.seconds,
            "data_seconds": record.data_seconds,
            **self.speed.rates(record),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            **extras,
            "global_batch_size": record.global_batch_size,
            "skipped_since_line": self._troubles.skipped,
            "nan_since_line": self._troubles.nan,
            "seconds_left": self._pace.seconds_for(trainer.schedule.num_steps - record.step),
        }

    def state(self) -> dict[str, Any]:
        """Counts since the last line."""
        return asdict(self._troubles)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the counts of a `state`."""
        counts = {each.name: state.get(each.name) for each in fields(Troubles)}
        self._troubles = Troubles(**{name: count for name, count in counts.items() if type(count) is int})

    def _memory_points(self) -> dict[str, float]:
        """Megatron-LM's tags of a GPU's memory."""
        if self.device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.device)
        return {
            "mem-reserved-bytes": stats["reserved_bytes.all.current"],
            "mem-allocated-bytes": stats["allocated_bytes.all.current"],
            "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
            "mem-allocated-count": stats["allocation.all.current"],
        }


class ProgressBar(Hook):
    """A progress bar at the foot of the terminal."""

    is_observer = True

    def start(self, trainer: Trainer) -> None:
        """Begin the bar where the run stands."""
        self.bar = tqdm(total=trainer.schedule.num_steps, initial=trainer.progress.step, desc="training", unit="step")

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Advance the bar by one step."""
        self.bar.set_postfix(loss=f"{record.result.loss:.3f}", refresh=False)
        self.bar.update()

    def finish(self, trainer: Trainer) -> None:
        """Leave the bar as it is."""
        self.bar.close()


def _number(value: Value) -> Value:
    """Infinity and not-a-number, which JSON does not have, as null."""
    return None if value is None or not math.isfinite(value) else value


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of the main rank: allocated on its GPU, or resident if it runs on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


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
