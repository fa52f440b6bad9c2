"""Schedules of learning rate, weight decay and global batch size: pure functions of the samples consumed before a step.

Progress is counted in samples, as Megatron-LM's scheduler counts it, so a resumed run needs to know `consumed_samples`
alone. A length given in steps is the samples that so many first steps consume: steps x global batch size, or fewer
where the run begins with smaller batches (Megatron-LM refuses such lengths with a ramp-up). The first step
has consumed none: with warm-up it uses `lr_warmup_init` (0 by default), as Megatron's does, and the step that has
consumed all of the warm-up is the first to use `lr`.

A learning rate rises by a row of WARMUPS, and then follows a row of STYLES. One cycle (Smith 2018, arXiv:1803.09820),
the OneCycle of DeepSpeed and of torch, is such a rise and a decay during which the momentum goes the opposite way, from
`cycle_max_momentum` to `cycle_min_momentum` at the peak and back.

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

Rise = Callable[[float, float], float]
"""A function from progress (0 to 1) and the steps of the warm-up to the fraction of the way to the peak (0 to 1)."""

WARMUPS: dict[str, Rise] = {
    "linear": lambda progress, _steps: progress,
    # DeepSpeed's WarmupLR counts from the second step on: the last step of the warm-up is one short of the peak.
    "late-linear": lambda progress, steps: max(progress - 1 / steps, 0.0),
    "cosine": lambda progress, _steps: 0.5 * (1 - math.cos(math.pi * progress)),
    "log": lambda progress, steps: math.log(max(progress * steps, 1.0)) / math.log(steps),
}

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
    global_batch_size: int = 1
    """Samples of a step, for what counts in steps: a logarithm, a range test, what follows the decay."""

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
        if config.lr_warmup_style == "log" and 0 < self.warmup_samples < 2 * self.global_batch_size:
            raise UserError(
                f"lr_warmup_style=log needs a warm-up of 2 steps, {2 * self.global_batch_size} samples, and has "
                f"{self.warmup_samples:g} samples; lengthen it, or use --lr-warmup-style linear"
            )
        last = self.momentum(self.train_samples)
        if last is not None and not 0 <= last < 1:
            raise UserError(
                f"momentum_tail_growth={config.momentum_tail_growth} takes cycle_max_momentum="
                f"{config.cycle_max_momentum} to {last:g} at the end of the run, which must be at least 0 and less "
                "than 1; use one nearer to 0"
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
        if self._is_warming_up(consumed_samples):
            return config.lr_warmup_init + (self.lr - config.lr_warmup_init) * self.height(consumed_samples)
        return STYLES[config.lr_decay_style](self, consumed_samples)

    def momentum(self, consumed_samples: int) -> float | None:
        """Momentum of the step that starts after `consumed_samples`; None if it does not cycle.

        The higher the learning rate is on its way to the peak, the lower is the momentum. After the decay it grows.
        """
        low, high = self.config.cycle_min_momentum, self.config.cycle_max_momentum
        if low is None or high is None:
            return None
        if consumed_samples > self.decay_samples:
            return high * (1 + self.config.momentum_tail_growth * self.steps(consumed_samples - self.decay_samples))
        return high - (high - low) * self.height(consumed_samples)

    def height(self, consumed_samples: int) -> float:
        """Fraction of the way to the peak, 0 to 1: up in the warm-up, from 1 down in the decay."""
        config = self.config
        if self._is_warming_up(consumed_samples):
            progress = _down_to_stair(consumed_samples, self.warmup_samples, config.lr_warmup_stairs)
            return WARMUPS[config.lr_warmup_style](progress, self.steps(self.warmup_samples))
        start, end = self._decay_start, self.decay_samples
        curve = DECAYS[config.lr_wsd_decay_style if config.lr_decay_style == "WSD" else config.lr_decay_style]
        if config.lr_decay_stairs is None:
            return curve(max(0.0, consumed_samples - start) / (end - start))
        return curve(1 - _down_to_stair(min(end - consumed_samples, end - start), end - start, config.lr_decay_stairs))

    @property
    def _decay_start(self) -> float:
        return float(self.decay_samples - self.wsd_samples) if self.wsd_samples else self.warmup_samples

    def steps(self, samples: float) -> float:
        """Steps that consume so many samples, where a step has the global batch size."""
        return samples / self.global_batch_size

    def _is_warming_up(self, consumed_samples: int) -> bool:
        return 0 < self.warmup_samples >= consumed_samples

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the step that starts after `consumed_samples`."""
        style = self.config.weight_decay_incr_style
        if style == "constant" or consumed_samples > self.train_samples:
            return self.end_weight_decay
        left = DECAYS[style](consumed_samples / self.train_samples)
        return self.end_weight_decay + left * (self.start_weight_decay - self.end_weight_decay)


def _down_to_stair(part: float, whole: float, stairs: int | None) -> float:
    """The fraction part / whole, rounded down to a whole number of stairs, if there are any."""
    # The product comes first: a quotient that is a whole number is exact, so no stair is missed by rounding.
    return part / whole if stairs is None else math.floor(part * stairs / whole) / stairs


def _decayed(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """From the peak down to min_lr, and what follows it."""
    if consumed_samples > schedule.decay_samples:
        return _after_decay(schedule, consumed_samples)
    least = schedule.config.min_lr
    return least + schedule.height(consumed_samples) * (schedule.lr - least)


def _inverse_square_root(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """The peak times sqrt(warm-up / samples), not below min_lr."""
    if consumed_samples > schedule.decay_samples:
        return _after_decay(schedule, consumed_samples)
    falling = schedule.lr * math.sqrt(max(schedule.warmup_samples, 1) / max(consumed_samples, 1))
    return max(schedule.config.min_lr, falling)


def _after_decay(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """min_lr, or less and less of it."""
    steps = schedule.steps(consumed_samples - schedule.decay_samples)
    return schedule.config.min_lr / (1 + schedule.config.lr_tail_decay * steps)


def _range_test(schedule: LearningRateSchedule, consumed_samples: int) -> float:
    """From `lr` up without an end, to see from where on the loss no longer falls."""
    config = schedule.config
    samples = consumed_samples - schedule.warmup_samples
    intervals = samples / (config.lr_range_test_iters * schedule.global_batch_size)
    if config.lr_range_test_staircase:
        intervals = math.floor(intervals)
    return schedule.lr * (1 + config.lr_range_test_rate * intervals)


STYLES: dict[str, Callable[[LearningRateSchedule, int], float]] = {
    "constant": lambda schedule, _consumed_samples: schedule.lr,
    **dict.fromkeys(("linear", "cosine", "WSD"), _decayed),
    "inverse-square-root": _inverse_square_root,
    "range-test": _range_test,
}
"""Learning rate after the warm-up, by --lr-decay-style."""


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
        global_batch_size=global_batch_size,
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
