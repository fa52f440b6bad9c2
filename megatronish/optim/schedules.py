"""Schedules of learning rate, weight decay and global batch size: pure functions of the samples consumed before a step.

Progress is counted in samples, as Megatron-LM's scheduler counts it, so a resumed run needs to know `consumed_samples`
alone. A length given in steps is the samples that so many first steps consume: steps x global batch size, or fewer
where the run begins with smaller batches (Megatron-LM refuses such lengths with a ramp-up). The first step
has consumed none: with warm-up it uses `lr_warmup_init` (0 by default), as Megatron's does, and the step that has
consumed all of the warm-up is the first to use `lr`.

The batch size is constant or grows. --rampup-batch-size: it grows from `start` by `increment` each time another equal
share of `ramp_samples` is consumed, and is `global_batch_size` from then on: Megatron-LM's rule, in exact integers.
(Megatron divides floats, and may be one step late where a share ends exactly at a step.) --step-batch-size-schedule: a
list of batch sizes, each from a number of samples on.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig, parse_batch_sizes
from megatronish.core.errors import UserError

Curve = Callable[[float], float]
"""A function from progress (0 to 1) to the fraction of the learning rate that is left (1 to 0)."""

DECAYS: dict[str, Curve] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning rate and weight decay as functions of consumed samples; all lengths are in samples."""

    config: OptimizerConfig
    lr: float
    warmup_samples: float
    decay_samples: int
    wsd_samples: int
    """Length of the last part of WSD; 0 for other styles."""
    train_samples: int
    """Length of the run, over which weight decay goes from its start to its end."""

    def __post_init__(self) -> None:
        config = self.config
        if not 0 <= config.min_lr <= self.lr:
            raise UserError(f"min_lr={config.min_lr} must be between 0 and lr={self.lr}; lower it")
        if config.lr_warmup_init > self.lr:
            raise UserError(f"lr_warmup_init={config.lr_warmup_init} must not be above lr={self.lr}; lower it")
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise UserError(
                f"warm-up of {self.warmup_samples:g} samples must be shorter than the decay of {self.decay_samples}; "
                "lower --lr-warmup-iters, or train for longer"
            )
        if config.lr_decay_style == "WSD" and not 0 < self.wsd_samples <= self.decay_samples:
            raise UserError(
                f"lr_decay_style=WSD decays over its last {self.wsd_samples} samples, which must be between 1 and "
                f"{self.decay_samples}; give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )
        if config.weight_decay_incr_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise UserError(
                f"weight_decay_incr_style=constant cannot go from {self.start_weight_decay} to "
                f"{self.end_weight_decay}; use --weight-decay-incr-style linear or cosine"
            )

    @property
    def start_weight_decay(self) -> float:
        """Weight decay that the first step uses."""
        start = self.config.start_weight_decay
        return self.config.weight_decay if start is None else start

    @property
    def end_weight_decay(self) -> float:
        """Weight decay from the last step on."""
        end = self.config.end_weight_decay
        return self.config.weight_decay if end is None else end

    @property
    def decoupled(self) -> "LearningRateSchedule | None":
        """Schedule of word embedding and output layer: the same shape between other rates; None without such rates."""
        config = self.config
        if config.decoupled_lr is None:
            return None
        min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        return replace(self, config=replace(config, min_lr=min_lr, decoupled_lr=None), lr=config.decoupled_lr)

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts after `consumed_samples`."""
        config = self.config
        if 0 < self.warmup_samples >= consumed_samples:
            return config.lr_warmup_init + (self.lr - config.lr_warmup_init) * consumed_samples / self.warmup_samples
        if config.lr_decay_style == "constant":
            return self.lr
        if consumed_samples > self.decay_samples:
            return config.min_lr
        if config.lr_decay_style == "inverse-square-root":
            return max(config.min_lr, self.lr * math.sqrt(max(self.warmup_samples, 1) / max(consumed_samples, 1)))
        if config.lr_decay_style == "WSD":
            curve, start = DECAYS[config.lr_wsd_decay_style], float(self.decay_samples - self.wsd_samples)
        else:
            curve, start = DECAYS[config.lr_decay_style], self.warmup_samples
        progress = max(0.0, consumed_samples - start) / (self.decay_samples - start)
        return config.min_lr + curve(progress) * (self.lr - config.min_lr)

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the step that starts after `consumed_samples`."""
        style = self.config.weight_decay_incr_style
        if style == "constant" or consumed_samples > self.train_samples:
            return self.end_weight_decay
        left = DECAYS[style](consumed_samples / self.train_samples)
        return self.end_weight_decay + left * (self.start_weight_decay - self.end_weight_decay)


def build_learning_rate_schedule(
    optimizer: OptimizerConfig, training: TrainingConfig, *, global_batch_size: int
) -> LearningRateSchedule:
    """Schedule of a run; UserError where its parts do not fit together.

    Each length may be given in steps or in samples, whichever the run itself is given in. Steps become the samples that
    they consume: while the batch grows, fewer than steps x global batch size.
    """
    if optimizer.lr is None:
        raise UserError("lr is not given; add --lr, 3e-4 for example")
    consumed = batch_sizes_of(training, global_batch_size=global_batch_size).consumed_samples
    train_samples = training.train_samples or consumed(training.train_iters or 0)
    if train_samples < 1:
        raise UserError("the length of the run is not given; add --train-iters, --train-samples or --num-epochs")
    decay_steps = optimizer.lr_decay_iters or training.train_iters or 0
    decay_samples = optimizer.lr_decay_samples or consumed(optimizer.lr_decay_iters or 0) or train_samples
    if optimizer.lr_warmup_fraction is None:
        warmup_samples: float = optimizer.lr_warmup_samples or consumed(optimizer.lr_warmup_iters or 0)
    else:
        warmup_samples = optimizer.lr_warmup_fraction * decay_samples
    wsd_samples = 0
    if optimizer.lr_decay_style == "WSD":
        # The last steps of the decay; more steps than the decay has are left to be refused.
        wsd_steps = optimizer.lr_wsd_decay_iters or 0
        last = consumed(max(decay_steps, wsd_steps)) - consumed(max(decay_steps - wsd_steps, 0))
        wsd_samples = optimizer.lr_wsd_decay_samples or last
    return LearningRateSchedule(
        config=optimizer,
        lr=optimizer.lr,
        warmup_samples=warmup_samples,
        decay_samples=decay_samples,
        wsd_samples=wsd_samples,
        train_samples=train_samples,
    )


class Phase(NamedTuple):
    """A number of steps with one batch size; num_steps is None for the last phase, which does not end."""

    batch_size: int
    num_steps: int | None


class BatchSizeSchedule(ABC):
    """The global batch size over a run. A kind of schedule says `at` and `next_change`, and the counts follow."""

    @abstractmethod
    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that starts after `consumed_samples`."""

    @abstractmethod
    def next_change(self, consumed_samples: int) -> int | None:
        """Least number of samples, above `consumed_samples`, with another batch size; None if there is none."""

    @staticmethod
    def of(rampup_batch_size: tuple[int, int, int] | None, *, global_batch_size: int) -> "RampUp":
        """The schedule of --rampup-batch-size START INCREMENT SAMPLES, or a constant one."""
        start, increment, ramp_samples = rampup_batch_size or (global_batch_size, 1, 0)
        return RampUp(start, increment, ramp_samples, global_batch_size)

    def consumed_samples(self, num_steps: int, *, start: int = 0) -> int:
        """Samples consumed after `num_steps` steps of a run that had consumed `start`."""
        consumed = start
        for phase in self._phases(start):
            steps = num_steps if phase.num_steps is None else min(num_steps, phase.num_steps)
            consumed += steps * phase.batch_size
            num_steps -= steps
            if num_steps == 0:
                break
        return consumed

    def num_steps(self, samples: int) -> int:
        """Number of whole steps that fit into `samples`, for --train-samples. The remaining samples are not used."""
        return self.num_steps_left(0, samples)

    def num_steps_left(self, consumed_samples: int, samples: int) -> int:
        """Number of whole steps after `consumed_samples` that fit into a run of `samples` samples."""
        total, left = 0, max(samples - consumed_samples, 0)
        for phase in self._phases(consumed_samples):
            fitting = left // phase.batch_size
            steps = fitting if phase.num_steps is None else min(fitting, phase.num_steps)
            total += steps
            left -= steps * phase.batch_size
            if phase.num_steps is None or fitting < phase.num_steps:
                break
        return total

    def num_steps_to(self, consumed_samples: int, samples: int) -> int:
        """Fewest steps after `consumed_samples` that reach `samples`, for --num-epochs: the last may go beyond."""
        whole = self.num_steps_left(consumed_samples, samples)
        return whole + (self.consumed_samples(whole, start=consumed_samples) < samples)

    def _phases(self, consumed_samples: int) -> Iterator[Phase]:
        """The batch sizes from there on, in order; sizes that a single large step jumps over are left out."""
        while (end := self.next_change(consumed_samples)) is not None:
            batch_size = self.at(consumed_samples)
            num_steps = -(-(end - consumed_samples) // batch_size)
            yield Phase(batch_size, num_steps)
            consumed_samples += num_steps * batch_size
        yield Phase(self.at(consumed_samples), None)


@dataclass(frozen=True)
class RampUp(BatchSizeSchedule):
    """Growth in equal increments. `start=global_batch_size` and `ramp_samples=0` for a constant batch size."""

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.global_batch_size:
            raise UserError(
                f"rampup_batch_size starts at {self.start}, which must be between 1 and "
                f"global_batch_size={self.global_batch_size}"
            )
        if self.increment < 1 or (self.global_batch_size - self.start) % self.increment:
            raise UserError(
                f"rampup_batch_size increment {self.increment} must divide the way from {self.start} to "
                f"global_batch_size={self.global_batch_size}, which is {self.global_batch_size - self.start}"
            )
        if self.ramp_samples < 0:
            raise UserError(f"rampup_batch_size takes {self.ramp_samples} samples, which must not be negative")

    @property
    def num_increments(self) -> int:
        """Number of times that the batch grows."""
        return (self.global_batch_size - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that starts after `consumed_samples`."""
        if consumed_samples >= self.ramp_samples:
            return self.global_batch_size
        return self.start + consumed_samples * self.num_increments // self.ramp_samples * self.increment

    def next_change(self, consumed_samples: int) -> int | None:
        """Least number of samples with a larger batch."""
        batch_size = self.at(consumed_samples)
        if batch_size == self.global_batch_size:
            return None
        grown = (batch_size - self.start) // self.increment + 1
        return -(-grown * self.ramp_samples // self.num_increments)


@dataclass(frozen=True)
class StepWise(BatchSizeSchedule):
    """Batch sizes, each from a number of samples on: ((samples, batch size), ...), the first from 0 on."""

    steps: tuple[tuple[int, int], ...]

    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that starts after `consumed_samples`."""
        return self.steps[self._number(consumed_samples)][1]

    def next_change(self, consumed_samples: int) -> int | None:
        """Least number of samples with the next batch size of the list."""
        number = self._number(consumed_samples) + 1
        return self.steps[number][0] if number < len(self.steps) else None

    def _number(self, consumed_samples: int) -> int:
        return bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1


def batch_sizes_of(training: TrainingConfig, *, global_batch_size: int) -> BatchSizeSchedule:
    """Schedule of a run's batch sizes: by a list, by increments, or one size."""
    if training.step_batch_size_schedule:
        return StepWise(parse_batch_sizes(training.step_batch_size_schedule, seq_length=training.seq_length))
    return BatchSizeSchedule.of(training.rampup_batch_size, global_batch_size=global_batch_size)
