"""Section [resilience] of a config: hangs, restarts, slow ranks, faults in numbers."""

from dataclasses import dataclass
from typing import Annotated

from megatronish.config.marks import at_least, at_most, greater_than


@dataclass(frozen=True)
class ResilienceConfig:
    """What a run does about ranks that hang or fail."""

    watch: bool = True
    """Watch the ranks: a run that hangs says which rank hangs, and where, and ends with status 1."""
    hang_seconds: Annotated[float | None, greater_than(0)] = None
    """A rank that makes no progress for so long hangs. Derived: 20 times the median step, at least 30."""
    hang_seconds_start: Annotated[float | None, greater_than(0)] = None
    """The same before the first steps. Derived: --hang-seconds, or 0.9 --distributed-timeout-minutes without it."""
    hang_seconds_evaluation: Annotated[float | None, greater_than(0)] = None
    """The same in evaluation. Derived like --hang-seconds-start."""
    hang_seconds_save: Annotated[float | None, greater_than(0)] = None
    """The same while a checkpoint is saved, and at the end. Derived like --hang-seconds-start."""
    max_restarts: Annotated[int, at_least(0), at_most(1_000_000)] = 0
    """A plain start begins again so many times after a failure, from the newest checkpoint."""
    check_replicas_interval: Annotated[int, at_least(0), at_most(2**63 - 1)] = 100
    """Steps between comparisons of the parameters that ranks hold alike, by a hash; also before each save. 0: never."""
    check_memory: bool = True
    """Refuse a start that expects to take more memory than its machines and devices have."""
    skip_loss_spikes: Annotated[float | None, greater_than(1)] = None
    """Leave out steps whose gradient norm is above this many times the median of the last 100."""
    straggler_interval: Annotated[int, at_least(0), at_most(2**63 - 1)] = 16
    """Steps between comparisons of the ranks' own times of a step; a rank that is slow twice is named. 0: never."""
    straggler_ratio: Annotated[float, greater_than(1)] = 1.3
    """A rank is slow whose own time is above this many times that of its peers."""
