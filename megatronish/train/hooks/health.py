"""The Health hook: RUN_DIR/health.json, which is young only while steps advance, for the probe of a scheduler.

    {"step": 120, "time": 1790000000.0, "phase": "step", "pid": 4711}

It is replaced after a step, at most once a second, by the main rank. A probe looks at its age: a run that saves or
evaluates for minutes makes none meanwhile, so allow for the longest of these. The last word of a run is its `phase`:
"finished", "stopped: SIGTERM", "failed: ...", "hangs: ...", written by whoever is there to write it, at last by the
launcher.
"""

import json
import os
import time
from pathlib import Path

from megatronish.core.errors import without_passwords
from megatronish.core.files import write_quickly
from megatronish.train.trainer import Hook, StepRecord, Trainer

HEALTH = "health.json"
FEWEST_SECONDS = 1.0
STEP = "step"
FAILED = "failed: "
LONGEST = 300  # characters of a phase


class Health(Hook):
    """Sign of life of a run, on the main rank alone."""

    is_observer = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / HEALTH
        self._next = 0.0

    def start(self, trainer: Trainer) -> None:
        """Say that the run is at work again, whatever an earlier start has said last."""
        say_health(self.path.parent, step=trainer.progress.step, phase=STEP)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Say that the step is done. Without room on the disk nothing is said, and the file gets old."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + FEWEST_SECONDS
        if not say_health(self.path.parent, step=record.step, phase=STEP):
            self._next = now + 10 * FEWEST_SECONDS

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Say that the run has failed."""
        say_health(self.path.parent, step=trainer.progress.step, phase=failed(error))


def say_health(folder: Path, *, step: int, phase: str) -> bool:
    """Replace the health of a run; False without room on the disk."""
    said = {"step": step, "time": time.time(), "phase": without_passwords(phase), "pid": os.getpid()}
    try:
        write_quickly(folder / HEALTH, json.dumps(said) + "\n")
    except OSError:
        return False
    return True


def say_last(folder: Path, phase: str, *, knows_first: bool = False) -> None:
    """Let this be the last word of a run that has none, at the step that was said last.

    Who `knows_first` knows the rank that failed first, and replaces what another one has said of its own failure.
    """
    try:
        said = json.loads((folder / HEALTH).read_text())
        is_open = said["phase"] == STEP or (knows_first and said["phase"].startswith(FAILED))
        step = int(said["step"])
    except FileNotFoundError:
        is_open, step = folder.is_dir(), 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if is_open:
        say_health(folder, step=step, phase=phase)


def failed(error: BaseException) -> str:
    """The last word of a run that an error has ended."""
    line = (without_passwords(str(error)).splitlines() or [""])[0]  # before the cut: half a URL is none
    return f"{FAILED}{line or type(error).__name__}"[:LONGEST]
