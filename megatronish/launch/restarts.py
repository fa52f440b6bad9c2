"""Restarts of a run by the launcher of this package: when a failed run begins again, and when it does not.

A run that fails begins again from its newest checkpoint: after status 1, which machines and signals cause, and not
after 2, a mistake of the user. Restarts are counted from zero once a run has made some steps. A failure with the same
sentence at the same step, several times in a row, is none of a machine's, and ends the run with a sentence.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatronish.launch.patience import apart
from megatronish.launch.terminal import say

GOOD_STEPS = 10  # beyond the step of the failure before, after which restarts are counted from zero
SAME_TIMES = 3  # the same failure at the same step in a row ends the run
PAUSE_SECONDS = 1.0  # before the second restart without a new step, doubled for each further one
LONGEST_PAUSE = 30.0
DISK_SECONDS = 10.0  # for the disk of the run folder to say what the last step was


def _no_step() -> int:
    """Number of the last step where no file says it."""
    return 0


@dataclass
class Restarts:
    """The restarts that are left to a run. `last_step` reads the number of the last step that was made.

    A run whose `folder`, or `save` folder after its first step, is not there any more does not begin again: it would be
    a new one.
    """

    most: int = 0
    last_step: Callable[[], int] = _no_step
    folder: Path | None = None
    save: Path | None = None
    used: int = field(default=0, init=False)
    sentence: str = field(default="", init=False)  # of the last attempt
    _step: int = field(default=-1, init=False)  # that of the failure before
    _place: tuple[int, str] | None = field(default=None, init=False)
    _same: int = field(default=0, init=False)

    def again(self, status: int, sentence: str) -> bool:
        """Whether to begin again after an attempt that ended so; prints why, if there are restarts at all."""
        self.sentence = sentence
        if self.most == 0 or status != 1 or not sentence:  # a planned stop may have any status, and says nothing
            return False
        seen = apart(DISK_SECONDS, self._look, otherwise=None)
        if seen is None:
            say(f"no restart: the disk of {self.folder} does not answer; start again when it does")
            return False
        step, gone = seen
        if gone:
            say(f"no restart: {gone[0]} was moved or removed while the run was in it; move it back, and start again")
            return False
        if step >= self._step + GOOD_STEPS:
            self.used = 0
        place = step, re.sub(r"\d[\d.,]*", "#", sentence.splitlines()[0] if sentence else "")
        self._same = self._same + 1 if place == self._place else 1
        pause = 0.0 if step > self._step else min(PAUSE_SECONDS * 2**self.used, LONGEST_PAUSE)
        self._step, self._place = max(step, self._step), place
        if self._same >= SAME_TIMES:
            say(f"no restart: the run failed {self._same} times after step {step} with the same sentence")
            return False
        if self.used >= self.most:
            say(f"no restart: --max-restarts {self.most} are used up")
            return False
        self.used += 1
        say(f"restart {self.used} of {self.most}, after step {step}")
        time.sleep(pause)
        return True

    def _look(self) -> tuple[int, list[Path]]:
        """The last step, and which folders are not there."""
        step = self.last_step()
        folders = (self.folder, self.save if step else None)
        return step, [path for path in folders if path is not None and _is_gone(path)]


def _is_gone(folder: Path) -> bool:
    """Whether a folder is not there; one that cannot be asked for, as on a disk that fails, may be."""
    try:
        folder.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
