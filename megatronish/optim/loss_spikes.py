"""Loss spikes: steps whose gradient is far larger than usual are left out (--skip-loss-spikes).

A batch of broken text can make one gradient many times as long as the others. Clipping shortens it, and its direction
still moves Adam's moments; PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) went back and left such batches
out. Here the step is left out as it comes: its gradient norm is above `factor` times the median of the last steps. The
norm is the same on all ranks, so all leave out the same step.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from megatronish.core.errors import RunError

WINDOW = 100  # norms of the median
FEWEST = 20  # norms before which nothing is left out
MOST_IN_A_ROW = 3


class LossSpikes:
    """Rule for the steps to be left out, with the gradient norms of the last steps; without a factor, none is."""

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def skips(self, grad_norm: float, *, step: int) -> bool:
        """Whether this step is left out; RunError for the fourth in a row, as then something else is wrong."""
        if self.factor is None:
            return False
        usual = median(self._norms) if len(self._norms) >= FEWEST else None
        if usual is None or grad_norm <= self.factor * usual:
            self._norms.append(grad_norm)
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise RunError(
                f"grad_norm={grad_norm:.4g} in step {step} is above {self.factor:g} times the median {usual:.4g}, as "
                f"it was in the {MOST_IN_A_ROW} steps before, which were left out: no single batch is the cause. Start "
                "again from the newest checkpoint with a lower --lr, or with a larger --skip-loss-spikes"
            )
        return True

    def state(self) -> dict[str, Any]:
        """The last norms, of JSON's types; empty where no step is ever left out."""
        return {} if self.factor is None else {"norms": list(self._norms), "in_a_row": self._in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `state`, so that a resumed run leaves out what a run without a stop would have."""
        self._norms.extend(float(norm) for norm in state.get("norms", ()))
        self._in_a_row = int(state.get("in_a_row", 0))
