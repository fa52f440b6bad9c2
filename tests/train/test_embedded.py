"""Tests of `train_rank`: runs inside a program that goes on, one after the other, which find it as they leave it."""

import contextlib
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import steps_of, tiny, train_on_ranks
from ranks import run_ranks

from megatronish import Hook, Place, RunError, StepRecord, Trainer, UserError, read_config, train_rank

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Seen(Hook):
    """Losses by step."""

    def __init__(self, *, raises_at: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.raises_at = raises_at

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        self.losses[record.step] = record.result.loss
        if record.step == self.raises_at:
            raise ArithmeticError("a bug of the program around it")


def state_of_the_process() -> dict[str, Any]:
    return {
        "environ": dict(os.environ),
        "handlers": [signal.getsignal(each) for each in SIGNALS],
        "folder": os.getcwd(),
        "argv": list(sys.argv),
        "group": dist.is_initialized(),
        "switches": (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
        "threads": sorted(each.name for each in threading.enumerate() if each.name == "save"),
        "streams": (sys.stdout, sys.stderr),
    }


def run(place: Place, argv: list[str], hook: Hook) -> None:
    config, notes = read_config(argv, world_size=place.world_size)
    train_rank(config, place, notes=notes, hooks=[hook])


def three_runs(place: Place, folder: Path) -> list[dict[int, float]]:
    """One in the main thread, one that fails, and the failed one again in another thread, where a Ray worker runs."""
    first, failing, again = Seen(), Seen(raises_at=3), Seen()
    layout = f"--dp {place.world_size} --deterministic-mode --async-save --save-interval 2 --micro-batch-size 2"
    with contextlib.redirect_stdout(io.StringIO()):
        before = state_of_the_process()
        run(place, tiny(folder / "a", layout), first)
        assert state_of_the_process() == before
        with pytest.raises(ArithmeticError, match="a bug of the program"):
            run(place, tiny(folder / "b", layout), failing)
        assert state_of_the_process() == before
        thread = threading.Thread(target=run, args=(place, tiny(folder / "b", layout), again))
        thread.start()
        thread.join()
        assert state_of_the_process() == before
    return [first.losses, failing.losses, again.losses]


def test_runs_follow_each_other_in_one_process_and_leave_it_as_it_was(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "whole", "--micro-batch-size 2"))
    whole = {step: pytest.approx(seen.loss, rel=1e-5) for step, seen in steps_of(tmp_path / "whole").items()}
    (losses,) = run_ranks(1, three_runs, tmp_path / "one")
    assert losses[0] == whole
    assert losses[1] == {step: whole[step] for step in (1, 2, 3)}
    assert losses[2] == {step: whole[step] for step in (3, 4, 5, 6)}


def be_told(place: Place, folder: Path) -> None:
    """The mistakes of a caller are raised, and end nothing."""
    with pytest.raises(RunError, match="the layout needs 2 ranks but there are 1"):
        train_rank(read_config(tiny(folder, "--dp 2")).config, place)
    with pytest.raises(UserError, match=r"--load .*nowhere holds no checkpoint"):
        run(place, tiny(folder, "--load /nowhere"), Seen())
    assert not dist.is_initialized()


def test_mistakes_are_raised(tmp_path: Path) -> None:
    run_ranks(1, be_told, tmp_path)


def two_runs(place: Place, folder: Path) -> list[dict[int, float]]:
    seen = [Seen(), Seen()]
    with contextlib.redirect_stdout(io.StringIO()):
        for number, hook in enumerate(seen):
            meeting = Place(**{**vars(place), "rendezvous": f"{place.rendezvous}_{number}"})
            run(meeting, tiny(folder / str(number), "--tp 2 --micro-batch-size 2"), hook)
    return [each.losses for each in seen]


def test_two_ranks_run_twice(tmp_path: Path) -> None:
    """Each run has a rendezvous of its own, as each start of Ray's workers has."""
    ranks = run_ranks(2, two_runs, tmp_path)
    assert ranks[0][0] == ranks[0][1] == ranks[1][0] and len(ranks[0][0]) == 6
