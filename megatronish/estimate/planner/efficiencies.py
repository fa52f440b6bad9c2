"""Constants of the time model: few, each with physical bounds and a prior, relative to what a device can achieve.

The eight of `FITTED` are fitted to the published steps of published.toml (tests/estimate/test_calibration.py), with a
penalty towards the prior, because the data do not identify them one by one; the others are fixed.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Bounds(NamedTuple):
    """Physical bounds of a constant, and where it is expected without data."""

    low: float
    prior: float
    high: float


FITTED = {
    "gemm": Bounds(0.80, 0.92, 1.0),
    "bmm": Bounds(0.3, 0.55, 0.8),
    "hbm": Bounds(0.6, 0.8, 0.95),
    "node": Bounds(0.7, 1.0, 1.1),
    "network": Bounds(0.5, 0.75, 0.95),
    "step_seconds": Bounds(0.002, 0.01, 0.03),
    "jitter": Bounds(0.0, 0.02, 0.05),
    "hop": Bounds(1.0, 3.0, 6.0),
}
"""Bounds and priors of the fitted constants."""


class KnownError(NamedTuple):
    """What is known of the model's error for a kind of steps: a part of the seconds, either way, and why that."""

    part: float
    reason: str


FITTED_ON = ("a100-sxm", "a100-sxm-40")
MEAN = KnownError(
    0.12,
    "the model's mean error on 401 published steps that it was not fitted to (median 9 %; one in ten is off by over "
    "26 %)",
)
TENTH = 0.26
MEASURED = KnownError(
    0.21,
    "what steps of a calibrated CPU took more than was forecast: the probe measures products, host and links, not the "
    "device's memory, attention and the loss",
)


def known_error(*, device: str, calibrated: bool, has_experts: bool) -> KnownError:
    """The error to expect of a step: larger where the constants were fitted to nothing like it."""
    of_kind = [*(["experts"] if has_experts else []), *([] if device in FITTED_ON else [device])]
    if calibrated and not has_experts:
        return MEASURED
    if not of_kind:
        return MEAN
    return KnownError(
        TENTH,
        f"no step of {' or '.join(of_kind)} is among those that the model was fitted to, and so far off is one in ten "
        "of 401 published steps that it was not fitted to",
    )


@dataclass(frozen=True)
class Efficiencies:
    """Constants of the time model; fractions of `Device` figures unless stated otherwise."""

    gemm: float = 0.94
    """Of the achievable FLOP/s: a large matrix product in a training step."""
    bmm: float = 0.565
    """The same of the products of explicit attention scores."""
    hbm: float = 0.835
    node: float = 1.0
    """Of the measured bus bandwidth inside a node."""
    network: float = 0.74
    step_seconds: float = 0.009
    """Fixed time of a step."""
    jitter: float = 0.0188
    """Part of a step that ranks wait for the slowest."""
    hop: float = 3.06
    """Times that a transfer between stages takes longer than its bytes at full speed: two sides have to meet."""
    flash: float = 0.6
    """Of the achievable FLOP/s: flash attention forward."""
    flash_backward: float = 2.5 * 1.15
    """FLOPs of its backward, over those of its forward, with its lower rate."""
    prologue: int = 128
    """Elements of the inner dimension that the start and the end of a tile cost."""
    fused: float = 0.7
    """Pointwise bytes of fused kernels or a compiled layer, over those without."""
    hidden: float = 0.8
    """Most of a transfer that overlapping computation hides."""
    uneven: float = 1.2
    """Load of the fullest rank of experts over the mean, at the worse end of the interval."""
