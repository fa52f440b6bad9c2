"""The Health hook: RUN_DIR/health.json, which is young only while steps advance, for the probe of a scheduler.

    {"step": 120, "time": 1790000000.0, "phase": "step", "pid": 4711}

It is replaced after a step, at most once a second, by the main rank. A probe looks at its age: a run that saves or
evaluates for minutes makes none meanwhile, so allow for the longest of these.
"""

import json
import os
import time
from pathlib import Path

from megatronish.files import write_quickly
from megatronish.train.trainer import Hook, StepRecord, Trainer

HEALTH = "health.json"
FEWEST_SECONDS = 1.0


class Health(Hook):
    """Sign of life of a run, on the main rank alone."""

    is_observer = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / HEALTH
        self._next = 0.0

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Say that the step is done. Without room on the disk nothing is said, and the file gets old."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + FEWEST_SECONDS
        said = {"step": record.step, "time": time.time(), "phase": "step", "pid": os.getpid()}
        try:
            write_quickly(self.path, json.dumps(said) + "\n")
        except OSError:
            self._next = now + 10 * FEWEST_SECONDS
