"""Limits of the phases of a run: how long a rank may make no progress before it counts as hanging."""

from dataclasses import dataclass

from megatronish.watch.record import PhaseName

TIMES_MEDIAN = 20.0
AT_LEAST = 30.0  # seconds
SHARE_OF_TIMEOUT = 0.9  # of torch's timeout of a collective, whose message names a rank that is sound


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress that each phase may have. `step` None: 20 times the median step, at least 30 s."""

    step: float | None
    start: float
    evaluation: float
    save: float
    timeout: float

    @classmethod
    def of(
        cls, *, step: float | None, start: float | None, evaluation: float | None, save: float | None, timeout: float
    ) -> "HangLimits":
        """Limits of the flags that are given. What is open is that of a step, or else just below torch's timeout."""
        others = SHARE_OF_TIMEOUT * timeout if step is None else step
        start, evaluation, save = (others if given is None else given for given in (start, evaluation, save))
        return cls(step, start, evaluation, save, timeout)

    def of_phase(self, phase: PhaseName, *, median_step: float | None) -> float:
        """Limit of a phase, where a step takes `median_step`; None as long as there were too few steps."""
        if phase in ("start", "evaluation"):
            return self.start if phase == "start" else self.evaluation
        if phase in ("save", "end"):
            return self.save
        if self.step is not None:
            return self.step
        if median_step is None:
            return self.start
        return min(max(AT_LEAST, TIMES_MEDIAN * median_step), SHARE_OF_TIMEOUT * self.timeout)
