"""Kills that are planted in jobs: SIGKILL in the middle of a step, or some time after the first one."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from megatronish.engine.engine import Engine
from megatronish.train.trainer import Trainer


def kill_all_in_step(number: int) -> None:
    """Planted in a job: SIGKILL to all of it in the middle of a step."""
    clip, left = Engine.clip, [number]

    def clip_or_die(self: Engine, grad_norm: float) -> float:
        left[0] -= 1
        if left[0] == 0:
            os.killpg(0, signal.SIGKILL)
        return clip(self, grad_norm)

    Engine.clip = clip_or_die  # type: ignore[method-assign]


def kill_after(seconds: float, rank: int | None) -> None:
    """Planted in a job: SIGKILL to all of it, or to one rank, so long after its first step."""
    run, begun = Engine.step, threading.Event()

    def kill() -> None:
        if rank is None:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self: Engine, *arguments: Any, **options: Any) -> Any:
        if not begun.is_set() and self.mesh.world.rank == (rank or 0):
            begun.set()
            timer = threading.Timer(seconds, kill)
            timer.daemon = True
            timer.start()
        return run(self, *arguments, **options)

    Engine.step = stepped  # type: ignore[method-assign]


def kill_last_in_step(done: int, marker: str) -> None:
    """Planted in a job: SIGKILL to the last rank, or the only one, once, at the step after `done`."""
    original = Trainer.step

    def dying(trainer: Trainer, *args: object) -> object:
        rank = trainer.engine.mesh.world.rank
        if trainer.progress.step == done and rank == trainer.engine.mesh.world.size - 1 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args)

    Trainer.step = dying  # type: ignore[method-assign,assignment]
