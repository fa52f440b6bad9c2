"""Steps that are left out: loss scaling for fp16, constant or dynamic, and spikes of the loss (--skip-loss-spikes).

fp16 represents magnitudes from 6e-8 to 65504, and many gradients are smaller. So the loss is multiplied by a scale
before backward, and the gradient is divided by it afterwards. Too large a scale overflows: the gradient norm is not
finite, the step is skipped, and a dynamic scale is halved; after many good steps it is doubled. An overflow is detected
in the global norm, which is the same on every rank, so all ranks skip the same step and their scales stay equal.

A batch of broken text can make one gradient many times as long as the others. Clipping shortens it, and its direction
still moves Adam's moments; PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) went back and left such batches
out. Here the step is left out as it comes: its gradient norm is above `factor` times the median of the last steps. The
norm is the same on all ranks, so all leave out the same step.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol

from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import RunError

LARGEST_SCALE = 2.0**120  # gradients that stay zero would double it until it is infinite


class LossScale(Protocol):
    """The factor that multiplies the loss of a step, and its update rule."""

    scale: float

    @property
    def skips_overflow(self) -> bool:
        """Whether a step whose gradient is not finite is skipped, and training continues."""

    @property
    def can_shrink(self) -> bool:
        """Whether further overflows would reduce the scale; if not, a smaller scale cannot be the remedy."""

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale; called after every step, good or skipped."""

    def state(self) -> dict[str, float]:
        """The state that a resumed run needs, as JSON values."""

    def load(self, state: Mapping[str, float]) -> None:
        """Restore `state()` of an earlier run; the state of another kind of loss scale is ignored."""


class ConstantLossScale:
    """A fixed scale: --loss-scale for fp16; 1 for fp32 and bf16, whose range is wide enough."""

    can_shrink = False

    def __init__(self, scale: float = 1.0, *, skips_overflow: bool = False) -> None:
        self.scale, self.skips_overflow = scale, skips_overflow

    def update(self, *, overflow: bool) -> None:
        """Keep the scale, also after an overflow."""

    def state(self) -> dict[str, float]:
        """An empty state: the scale comes from the config."""
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        """Ignore the state: the scale comes from the config."""


class DynamicLossScale:
    """As large a scale as gradients allow, by Megatron-LM's rule.

    The first `hysteresis` - 1 overflows change nothing; the next one and every further one halve the scale, down to
    `minimum`. After `window` good steps in a row the scale is doubled and the count of overflows starts again.
    """

    skips_overflow = True

    def __init__(self, *, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale, self.minimum, self.window, self.hysteresis = initial, minimum, window, hysteresis
        self._good_steps, self._overflows_left = 0, hysteresis

    @property
    def can_shrink(self) -> bool:
        """False at the minimum: an overflow there has another cause than the scale."""
        return self.scale > self.minimum

    def update(self, *, overflow: bool) -> None:
        """Halve the scale after too many overflows, double it after `window` good steps."""
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self.window:
            self.scale = min(self.scale * 2, LARGEST_SCALE)
            self._good_steps, self._overflows_left = 0, self.hysteresis

    def state(self) -> dict[str, float]:
        """The scale and its two counters, under Megatron-LM's names."""
        return {"scale": self.scale, "growth_tracker": self._good_steps, "hysteresis_tracker": self._overflows_left}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore `state()`; the empty state of a run without a dynamic scale changes nothing."""
        if state:
            self.scale = max(state["scale"], self.minimum)
            self._good_steps, self._overflows_left = int(state["growth_tracker"]), int(state["hysteresis_tracker"])


def loss_scale_of(training: TrainingConfig) -> LossScale:
    """The loss scale that the config asks for."""
    if not training.fp16:
        return ConstantLossScale()
    if training.loss_scale:
        return ConstantLossScale(training.loss_scale, skips_overflow=True)
    return DynamicLossScale(
        initial=training.initial_loss_scale,
        minimum=training.min_loss_scale,
        window=training.loss_scale_window,
        hysteresis=training.hysteresis,
    )


WINDOW = 100  # norms of the median
FEWEST = 20  # norms before which nothing is left out
MOST_IN_A_ROW = 3


class NormSpikes:
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
