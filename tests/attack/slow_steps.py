"""Plug-in of the attacks: a hook that makes steps take half a second, so that faults fall into some of them."""

import time

from megatronish.plugins import register_hook
from megatronish.train.setup import TrainingJob
from megatronish.train.trainer import Hook, StepRecord, Trainer


class SlowSteps(Hook):
    """Waits after each step."""

    def __init__(self, _job: TrainingJob) -> None:
        super().__init__()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Wait half a second."""
        time.sleep(0.5)


register_hook("slow_steps", SlowSteps)
