"""Fit of the time model's constants to published steps: a pattern search inside bounds, with a penalty to the prior.

Without the penalty constants that the data do not identify run to their bounds, and predictions elsewhere get worse.
"""

from dataclasses import replace
from typing import Any

from megatronish.estimate.planner.efficiencies import FITTED, Efficiencies
from megatronish.estimate.planner.published import published_steps

PENALTY = 0.004  # of a constant at the middle between its prior and a bound, in units of the mean error
SHRINK, SMALLEST = 0.5, 0.01


def loss(efficiencies: Efficiencies) -> float:
    """Mean size of the errors over all published steps, and the penalties."""
    steps = published_steps()
    errors = [abs(step.predicted(efficiencies).expected / step.seconds - 1) for step in steps]
    return sum(errors) / len(errors) + penalty(efficiencies)


def penalty(efficiencies: Efficiencies) -> float:
    """Penalty of all constants that are away from their priors, growing with the square of the distance."""
    distances = (
        (getattr(efficiencies, name) - bounds.prior) / (bounds.high - bounds.low) for name, bounds in FITTED.items()
    )
    return PENALTY * sum((4 * distance) ** 2 for distance in distances)


def fitted(start: Efficiencies | None = None) -> Efficiencies:
    """The constants that fit best, from the priors on unless a start is given."""
    priors: dict[str, Any] = {name: bounds.prior for name, bounds in FITTED.items()}
    best = start or replace(Efficiencies(), **priors)
    least, width = loss(best), 0.1
    while width > SMALLEST:
        before = least
        for name, bounds in FITTED.items():
            for sign in (1, -1):
                value = getattr(best, name) + sign * width * (bounds.high - bounds.low)
                changed: dict[str, Any] = {name: min(bounds.high, max(bounds.low, value))}
                tried = replace(best, **changed)
                if (found := loss(tried)) < least:
                    best, least = tried, found
        if least == before:
            width *= SHRINK
    return best
