"""Clock of the GPU report, which can be told that all here takes many times as long as it does."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Seconds of a machine that is `factor` times slower than this one: how the report does there is tried here."""

    factor: float = 1.0

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic() * self.factor

    def real(self, seconds: float) -> float:
        """Seconds of this machine in which the clock's go by."""
        return seconds / self.factor
