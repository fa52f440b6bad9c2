"""Global batch size over a run: --rampup-batch-size as arithmetic of steps and samples.

The batch grows from `start` by `increment` each time another equal share of `ramp_samples` is consumed, and is
`global_batch_size` from then on: Megatron-LM's rule, in exact integers. (Megatron divides floats, and may be one step
late where a share ends exactly at a step.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatronish.errors import UserError


class Phase(NamedTuple):
    """A number of steps with one batch size; num_steps is None for the last phase, which does not end."""

    batch_size: int
    num_steps: int | None


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The global batch size over a run. `start=global_batch_size` and `ramp_samples=0` for a constant one."""

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

    @classmethod
    def of(cls, rampup_batch_size: tuple[int, int, int] | None, *, global_batch_size: int) -> "BatchSizeSchedule":
        """The schedule of --rampup-batch-size START INCREMENT SAMPLES, or a constant one."""
        start, increment, ramp_samples = rampup_batch_size or (global_batch_size, 1, 0)
        return cls(start, increment, ramp_samples, global_batch_size)

    @property
    def num_increments(self) -> int:
        """Number of times that the batch grows."""
        return (self.global_batch_size - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """Global batch size of the step that starts after `consumed_samples`."""
        if consumed_samples >= self.ramp_samples:
            return self.global_batch_size
        return self.start + consumed_samples * self.num_increments // self.ramp_samples * self.increment

    def consumed_samples(self, num_steps: int) -> int:
        """Samples consumed after the first `num_steps` steps of a run."""
        consumed = 0
        for phase in self._phases():
            steps = num_steps if phase.num_steps is None else min(num_steps, phase.num_steps)
            consumed += steps * phase.batch_size
            num_steps -= steps
            if num_steps == 0:
                break
        return consumed

    def num_steps_left(self, consumed_samples: int, samples: int) -> int:
        """Number of whole steps after `consumed_samples` that fit into a run of `samples` samples."""
        steps = 0
        while consumed_samples < self.ramp_samples and consumed_samples + self.at(consumed_samples) <= samples:
            consumed_samples += self.at(consumed_samples)
            steps += 1
        return steps + max(samples - consumed_samples, 0) // self.at(consumed_samples)

    def num_steps(self, samples: int) -> int:
        """Number of whole steps that fit into `samples`, for --train-samples. The remaining samples are not used."""
        total = 0
        for phase in self._phases():
            fitting = samples // phase.batch_size
            steps = fitting if phase.num_steps is None else min(fitting, phase.num_steps)
            total += steps
            samples -= steps * phase.batch_size
            if steps == fitting:
                break
        return total

    def _phases(self) -> Iterator[Phase]:
        """The batch sizes in order; sizes that a single large step jumps over are left out."""
        consumed = 0
        while (batch_size := self.at(consumed)) < self.global_batch_size:
            grown = (batch_size - self.start) // self.increment + 1
            end = -(-grown * self.ramp_samples // self.num_increments)  # the first sample count with a larger batch
            num_steps = -(-(end - consumed) // batch_size)
            yield Phase(batch_size, num_steps)
            consumed += num_steps * batch_size
        yield Phase(self.global_batch_size, None)
