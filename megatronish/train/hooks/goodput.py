"""The Goodput hook: where the time of a run went, over all its starts; goodput is the share that was training.

RUN_DIR/goodput.json adds up seconds by cause:

    training     steps, except those that a later start did again
    lost         steps that were done again: those after the checkpoint from which a start resumed
    data         the main rank waited for its next batch
    saving, evaluating
    starting     from the beginning of the rank to the first step: folders, data, model, loading
    down         from the last sign of a start that failed to the next start
    other        logs, pictures, hooks of plug-ins

Python and torch are loaded before a rank begins, and curves are drawn after the last count: neither is counted, unless
a later start finds that this one failed (`down`).

After a start that ended as it should (finished, or stopped on request) no `down` time is counted.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatronish.core.aside import Aside
from megatronish.core.files import ordinary, write_quickly
from megatronish.train.trainer import Hook, StepRecord, Trainer
from megatronish.watch.record import PhaseName, RankRecord

LEDGER = "goodput.json"
CAUSES = {
    "start": "starting",
    "data": "data",
    "step": "training",
    "evaluation": "evaluating",
    "save": "saving",
    "hook": "other",
    "end": "other",
}
"""Causes of the ledger by the phases of a rank."""
COUNTS = ("last_step", "steps", "starts", "lost_steps")
WRITE_SECONDS = 5.0
MOST_SECONDS = 2.0**40


@dataclass
class Ledger:
    """Sums over all starts of a run. `counts` has the last step, steps, starts and lost steps.

    `recoveries` are seconds from the last sign of a failed start to a new step.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds_to_first_step: float | None = None
    recoveries: list[float] = field(default_factory=list)
    seen: float = 0.0
    has_ended: bool = True

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        """The ledger of the starts before; a new one where there is none that can be read."""
        try:
            ledger = cls(**json.loads(ordinary(path).read_text()))
            numbers = [*ledger.seconds.values(), *ledger.recoveries, ledger.seen, ledger.seconds_to_first_step or 0.0]
            is_sound = all(type(each) in (int, float) and abs(each) < MOST_SECONDS for each in numbers)
            is_sound &= all(name.isascii() for name in ledger.seconds)
            is_sound &= all(type(each) is int and each >= 0 for each in ledger.counts.values())
            return ledger if is_sound else cls()
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return cls()

    @property
    def goodput(self) -> float:
        """Share of the time that was training and not lost."""
        total = sum(self.seconds.values())
        return self.seconds.get("training", 0.0) / total if total else 0.0

    def begin(self, step: int, *, now: float) -> float | None:
        """Count a start that resumes after `step`; seconds since the last sign, if the start before has failed."""
        counts = self.counts = {name: self.counts.get(name, 0) for name in COUNTS}
        counts["starts"] += 1
        again = min(counts["last_step"] - step, counts["steps"])
        if again > 0:
            lost = self.seconds.get("training", 0.0) * again / counts["steps"]
            self.seconds["training"] -= lost
            self.seconds["lost"] = self.seconds.get("lost", 0.0) + lost
            counts["lost_steps"] += again
            counts["steps"] -= again
        down = None if self.has_ended or not self.seen else max(now - self.seen, 0.0)
        if down is not None:
            self.seconds["down"] = self.seconds.get("down", 0.0) + down
        counts["last_step"], self.has_ended = step, False
        return down

    def told(self) -> str:
        """` goodput 93.1 %: training 120 s, ...`, the largest first."""
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05)
        line = f" goodput {self.goodput:.1%}: {spent}"
        if self.seconds_to_first_step is not None:
            line += f"; first step after {self.seconds_to_first_step:.1f} s"
        if self.recoveries:
            mean, number = sum(self.recoveries) / len(self.recoveries), len(self.recoveries)
            line += f"; {number} recover{'y' if number == 1 else 'ies'}, on average in {mean:.1f} s"
        lost = self.counts.get("lost_steps", 0)
        return line + (f"; {lost} steps done again" if lost else "")


class Goodput(Hook):
    """Ledger of a run, kept by the main rank."""

    is_observer = True

    def __init__(self, folder: Path, record: RankRecord) -> None:
        self.path, self.record, self.ledger = folder / LEDGER, record, Ledger()
        self._aside = Aside("the share of goodput in the log")
        self._down: float | None = None
        self._counted: Mapping[PhaseName, float] = {}
        self._next_write = 0.0
        self._is_first = True

    def start(self, trainer: Trainer) -> None:
        """Continue the ledger of the starts before."""
        self.ledger = Ledger.read(self.path)
        began = time.time() - self.record.age()
        self._down = self.ledger.begin(trainer.progress.step, now=began)

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Count what has passed since the last step."""
        ledger = self.ledger
        if self._is_first:
            self._is_first = False
            if ledger.seconds_to_first_step is None:
                ledger.seconds_to_first_step = self.record.age()
            if self._down is not None:
                ledger.recoveries.append(self._down + self.record.age())
        ledger.counts["last_step"] = record.step
        ledger.counts["steps"] += 1
        if (now := time.monotonic()) >= self._next_write:
            self._next_write = now + WRITE_SECONDS
            self._count()
            self._write()

    def finish(self, trainer: Trainer) -> None:
        """Print where the time went."""
        self._count()
        self.ledger.has_ended = True
        self._write()
        tqdm.write(self.ledger.told())

    def share(self) -> float:
        """Share of the time so far that was training, for the log; not a number where it cannot be counted."""
        with self._aside.guard():
            self._count()
        return nan if self._aside.is_off else self.ledger.goodput

    def _count(self) -> None:
        now = self.record.seconds_by_phase()
        for phase, seconds in now.items():
            cause = CAUSES[phase]
            gained = seconds - self._counted.get(phase, 0.0)
            self.ledger.seconds[cause] = self.ledger.seconds.get(cause, 0.0) + gained
        self._counted = now

    def _write(self) -> None:
        self.ledger.seen = time.time()
        with suppress(OSError):  # a full disk: the next write tells
            write_quickly(self.path, json.dumps(_rounded(asdict(self.ledger)), indent=1) + "\n")


def _rounded(values: Any) -> Any:
    """The same with numbers of three decimals."""
    if isinstance(values, float):
        return round(values, 3)
    if isinstance(values, dict):
        return {name: _rounded(value) for name, value in values.items()}
    return [_rounded(value) for value in values] if isinstance(values, list) else values
