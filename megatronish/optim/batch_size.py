"""Global batch size over a run, as arithmetic of steps and samples: constant, or growing.

--rampup-batch-size: the batch grows from `start` by `increment` each time another equal share of `ramp_samples` is
consumed, and is `global_batch_size` from then on: Megatron-LM's rule, in exact integers. (Megatron divides floats, and
may be one step late where a share ends exactly at a step.) --step-batch-size-schedule: a list of batch sizes, each from
a number of samples on.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatronish.config.batch_sizes import parse_batch_sizes
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError


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
