"""Hangs that tests plant into a run: each is a function that a job calls before it starts its ranks."""

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatronish.checkpoint.storage import CheckpointWriter
from megatronish.engine.engine import Engine
from megatronish.launch import terminal
from megatronish.model.block import TransformerBlock
from megatronish.parallel import comm
from megatronish.train import run as training
from megatronish.train.hooks.evaluate import Evaluate
from megatronish.train.setup import TrainingJob
from megatronish.train.trainer import Trainer

FOREVER = 600.0  # seconds


@dataclass
class Planted:
    """What a plant leaves: the time at which the hang begins goes into a file."""

    rank: int
    step: int
    file: str

    def begins(self) -> None:
        """Note the time of the beginning, on the machine's monotonic clock."""
        with open(self.file, "w") as file:
            file.write(str(time.monotonic()))

    def sleep(self, *_: Any, **__: Any) -> None:
        """Hang in Python."""
        self.begins()
        time.sleep(FOREVER)

    def stop(self, *_: Any, **__: Any) -> None:
        """Hang as by SIGSTOP."""
        self.begins()
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self, *_: Any, **__: Any) -> None:
        """End with status 0, in the middle."""
        self.begins()
        os._exit(0)


def _before(owner: Any, name: str, act: Callable[..., None], when: Callable[..., bool]) -> None:
    """Let `owner.name` call `act` first, with its own arguments, where `when` says so."""
    original = getattr(owner, name)

    def replacement(*args: Any, **named: Any) -> Any:
        if when(*args, **named):
            act(*args, **named)
        return original(*args, **named)

    setattr(owner, name, replacement)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def in_step(rank: int, step: int, file: str, how: str = "sleep") -> None:
    """The rank hangs at the beginning of a step."""
    planted = Planted(rank, step, file)
    when = lambda engine, *_, num_steps_done, **__: num_steps_done == step and engine.mesh.world.rank == rank  # noqa: E731
    _before(Engine, "step", getattr(planted, how), when)


def in_loader(rank: int, step: int, file: str) -> None:
    """The rank's data do not come."""
    planted = Planted(rank, step, file)
    original = TrainingJob.batches_of

    def batches_of(job: TrainingJob, dataset: Any) -> Any:
        prepare = original(job, dataset)
        size = job.config.global_batch_size

        def slow(consumed: int, num: int) -> Any:
            if consumed == step * size and job.mesh.world.rank == rank:
                planted.sleep()
            return prepare(consumed, num)

        return slow

    TrainingJob.batches_of = batches_of  # type: ignore[method-assign]


def in_save(rank: int, _step: int, file: str) -> None:
    """The disk of the rank does not answer."""
    planted = Planted(rank, 0, file)
    _before(CheckpointWriter, "write_data", planted.sleep, lambda *_: _rank() == rank)


def in_start(rank: int, _step: int, file: str) -> None:
    """The rank does not get to its data."""
    planted = Planted(rank, 0, file)
    original = TrainingJob.open.__func__  # type: ignore[attr-defined]

    def opened(kind: Any, config: Any, mesh: Any) -> Any:
        if mesh.world.rank == rank:
            planted.sleep()
        return original(kind, config, mesh)

    TrainingJob.open = classmethod(opened)  # type: ignore[assignment,method-assign]


def before_meeting(rank: int, _step: int, file: str) -> None:
    """The rank does not come to the meeting of all."""
    planted = Planted(rank, 0, file)
    _before(training, "start_mesh", lambda *_, **__: planted.sleep(), lambda _config, place, **_: place.rank == rank)


def at_end(rank: int, _step: int, file: str) -> None:
    """The rank does not return from leaving."""
    planted = Planted(rank, 0, file)
    _before(training, "leave", planted.sleep, lambda: _rank() == rank)


def in_evaluation(rank: int, _step: int, file: str) -> None:
    """The rank does not evaluate."""
    planted = Planted(rank, 0, file)
    _before(Evaluate, "_evaluate", planted.sleep, lambda *_: _rank() == rank)


def in_layer(rank: int, step: int, file: str) -> None:
    """The rank hangs in a layer of its model."""
    planted, steps = Planted(rank, step, file), {"done": 0}
    original = Trainer.step

    def counted(trainer: Trainer, *args: Any) -> Any:
        steps["done"] = trainer.progress.step
        return original(trainer, *args)

    Trainer.step = counted  # type: ignore[method-assign]
    _before(TransformerBlock, "forward", planted.sleep, lambda *_: steps["done"] == step and _rank() == rank)


def desync(rank: int, step: int, file: str, what: str = "more") -> None:
    """The rank makes one collective more than the others, or one of another shape or kind."""
    planted = Planted(rank, step, file)

    def act(engine: Engine, *_: Any, **__: Any) -> None:
        planted.begins()
        world = engine.mesh.world
        if what == "more":
            comm.start_all_reduce(torch.zeros(3), world)
        elif what == "gather":
            comm.start_all_gather(torch.zeros(3), world)

    when = lambda engine, *_, num_steps_done, **__: num_steps_done == step and engine.mesh.world.rank == rank  # noqa: E731
    _before(Engine, "step", act, when)


def circle(rank: int, step: int, file: str) -> None:
    """The rank waits on one axis, another one for it on a second one."""
    planted = Planted(rank, step, file)

    def act(engine: Engine, *_: Any, **__: Any) -> None:
        planted.begins()
        comm.all_reduce(torch.zeros(3), engine.mesh.tp)

    when = lambda engine, *_, num_steps_done, **__: num_steps_done == step and engine.mesh.world.rank == rank  # noqa: E731
    _before(Engine, "step", act, when)


def leaving_early(rank: int, step: int, file: str) -> None:
    """The rank ends with status 0 in the middle."""
    in_step(rank, step, file, "leave")


def stopped(rank: int, step: int, file: str) -> None:
    """The rank is stopped by a signal."""
    in_step(rank, step, file, "stop")


def all_stopped(_rank: int, step: int, file: str) -> None:
    """All ranks are stopped by a signal, and the launcher is not."""
    planted = Planted(0, step, file)
    _before(Engine, "step", planted.stop, lambda *_, num_steps_done, **__: num_steps_done == step)


def keeping_the_lock(_rank: int, step: int, file: str) -> None:
    """The main thread keeps Python's lock in native code, on all ranks: no other thread of theirs runs.

    Not before a guard can know that steps have begun: eight tiny ones take less than the time between two pulses.
    """
    planted = Planted(0, step, file)

    def act(*_: Any, **__: Any) -> None:
        time.sleep(1.0)
        planted.begins()
        while True:  # the signal of a guard ends one of them
            ctypes.PyDLL(None).sleep(int(FOREVER))

    _before(Engine, "step", act, lambda *_, num_steps_done, **__: num_steps_done == step)


def stalled_terminal(*_: Any) -> None:
    """Nobody reads the pipe that stdout and stderr are, and soon no more is left for it; no beginning is noted."""
    terminal.LAST_SECONDS = 0.5
    _reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
