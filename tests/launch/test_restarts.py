"""Tests of --max-restarts: a failed run begins again from its newest checkpoint, unless that would not help."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from jobs import run_job, started, steps_of, tiny, train_on_ranks
from ranks import wait_until

from megatronish.launch.restarts import GOOD_STEPS, SAME_TIMES, Restarts
from megatronish.train.folder import last_step
from megatronish.train.trainer import Trainer


def kill_in_step(step: int, marker: str) -> None:
    """Rank 1, or the only one, is killed in a step, once."""
    original = Trainer.step

    def dying(trainer: Trainer, *args: object) -> object:
        rank = trainer.engine.mesh.world.rank
        if trainer.progress.step == step and rank == trainer.engine.mesh.world.size - 1 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args)

    Trainer.step = dying  # type: ignore[method-assign,assignment]


def fail_in_step(step: int) -> None:
    """Every rank fails in a step, each time."""
    original = Trainer.step

    def failing(trainer: Trainer, *args: object) -> object:
        if trainer.progress.step == step:
            raise ArithmeticError("one too many")
        return original(trainer, *args)

    Trainer.step = failing  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("layout", ["--dp 1", "--dp 2"])
def test_a_killed_run_begins_again_and_its_losses_are_those_of_an_undisturbed_one(tmp_path: Path, layout: str) -> None:
    argv = tiny(tmp_path / "run", f"{layout} --save-interval 2 --max-restarts 1")
    ended = run_job(argv, tmp_path, plant=kill_in_step, plant_args=(3, str(tmp_path / "marker")))
    assert ended.status == 0, ended.errors
    assert "restart 1 of 1, after step 3\n" in ended.errors
    train_on_ranks(tiny(tmp_path / "calm", "--save-interval 2"))
    seen, calm = steps_of(tmp_path / "run"), steps_of(tmp_path / "calm")
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    for step, values in calm.items():
        assert seen[step] == pytest.approx(values, rel=1e-5)


def test_the_same_failure_at_the_same_step_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--dp 2 --save-interval 2 --max-restarts 9")
    ended = run_job(argv, tmp_path, plant=fail_in_step, plant_args=(3,))
    assert ended.status == 1
    assert ended.errors.count("ArithmeticError: one too many") == SAME_TIMES
    assert ended.errors.endswith(f"no restart: the run failed {SAME_TIMES} times after step 3 with the same sentence\n")


def test_two_interrupts_end_a_run_that_has_restarts(tmp_path: Path) -> None:
    with started(tiny(tmp_path / "run", "--dp 2 --train-iters 100000 --max-restarts 9"), tmp_path) as job:
        assert wait_until(lambda: last_step(tmp_path / "run" / "metrics.jsonl") > 2, timeout=30)
        children = subprocess.run(["pgrep", "-P", str(job.process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[-1]), signal.SIGSTOP)  # which cannot save any more
        job.signal(signal.SIGINT)
        assert wait_until(lambda: "press Ctrl-C again" in job.errors)
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        assert "restart" not in job.errors


class Steps:
    """The last step of a run, as a test sets it."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> int:
        return self.last


def test_restarts_are_used_up_and_counted_from_zero_after_good_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    steps = Steps()
    restarts = Restarts(2, steps)
    assert not restarts.again(2, "a mistake")
    assert not restarts.again(130, "interrupted")
    assert restarts.again(1, "first")
    assert restarts.again(1, "second")
    assert not restarts.again(1, "third")
    assert "no restart: --max-restarts 2 are used up" in capsys.readouterr().err
    steps.last = GOOD_STEPS
    assert restarts.again(1, "first")
    assert not Restarts(0, steps).again(1, "first")
