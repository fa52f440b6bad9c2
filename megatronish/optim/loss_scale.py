"""By how much is the loss multiplied so that fp16 can hold its gradients, and what does an overflow change?

fp16 ends at 65504 above and at 6e-8 below, where most gradients lie. So the loss is multiplied before the backward and
the gradient divided after it. Too large a scale overflows: the gradient's norm is not finite, the step is skipped, and
the scale gives way; after many good steps it tries the next power of two. Whether a step overflowed is read from the
global norm, which is the same on every rank, so all ranks skip together and their scales stay equal.
"""

from collections.abc import Mapping
from typing import Protocol

from megatronish.config.training import TrainingConfig

LARGEST_SCALE = 2.0**120  # gradients that stay zero would double it until it is infinite


class LossScale(Protocol):
    """What the loss of a step is multiplied by."""

    scale: float

    @property
    def skips_overflow(self) -> bool:
        """A step whose gradient is not finite is left out, and the run goes on."""

    @property
    def can_shrink(self) -> bool:
        """Overflows make the scale smaller, now or soon; where they do not, an overflow is no matter of the scale."""

    def update(self, *, overflow: bool) -> None:
        """After every step, good or skipped."""

    def state(self) -> dict[str, float]:
        """What a resumed run needs, as JSON can hold it."""

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from `state()` of an earlier run; a run of another kind left nothing that counts here."""


class ConstantLossScale:
    """The same in every step: --loss-scale under fp16; 1 under fp32 and bf16, whose range needs none."""

    can_shrink = False

    def __init__(self, scale: float = 1.0, *, skips_overflow: bool = False) -> None:
        self.scale, self.skips_overflow = scale, skips_overflow

    def update(self, *, overflow: bool) -> None:
        """Nothing changes."""

    def state(self) -> dict[str, float]:
        """Nothing: the scale is the config's."""
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        """Nothing: the scale is the config's."""


class DynamicLossScale:
    """As large as gradients allow, by Megatron-LM's rule.

    Each overflow uses up one of `hysteresis` that are forgiven; with the last of them, and with each one after it, the
    scale is halved, down to `minimum`. After `window` good steps in a row it is doubled, and as many are forgiven anew.
    """

    skips_overflow = True

    def __init__(self, *, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale, self.minimum, self.window, self.hysteresis = initial, minimum, window, hysteresis
        self._good_steps, self._forgiven = 0, hysteresis

    @property
    def can_shrink(self) -> bool:
        """False at the minimum: whatever overflows there is no matter of the scale."""
        return self.scale > self.minimum

    def update(self, *, overflow: bool) -> None:
        """After every step, good or skipped."""
        if overflow:
            self._good_steps = 0
            self._forgiven -= 1
            if self._forgiven <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self.window:
            self.scale = min(self.scale * 2, LARGEST_SCALE)
            self._good_steps, self._forgiven = 0, self.hysteresis

    def state(self) -> dict[str, float]:
        """Under Megatron-LM's names."""
        return {"scale": self.scale, "growth_tracker": self._good_steps, "hysteresis_tracker": self._forgiven}

    def load(self, state: Mapping[str, float]) -> None:
        """From `state()`; what a run without a dynamic scale left is empty, and changes nothing."""
        if state:
            self.scale = max(state["scale"], self.minimum)
            self._good_steps, self._forgiven = int(state["growth_tracker"]), int(state["hysteresis_tracker"])


def loss_scale_of(training: TrainingConfig) -> LossScale:
    """What the config asks for."""
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
