"""Tests of --max-restarts: a failed run begins again from its newest checkpoint, unless that would not help."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from jobs import checkpoints_of, run_job, started, steps_of, tiny, train_on_ranks
from planted_kills import kill_last_in_step
from ranks import wait_until
from sweeps import some_of

from megatronish.checkpoint.checksums import Checksums
from megatronish.launch import restarts
from megatronish.launch.patience import apart
from megatronish.launch.restarts import GOOD_STEPS, SAME_TIMES, Restarts
from megatronish.train.folder import last_step
from megatronish.train.resume import _has_saved
from megatronish.train.trainer import Trainer


def fail_in_step(step: int) -> None:
    """Every rank fails in a step, each time; restarts pause a tenth as long."""
    original = Trainer.step
    restarts.PAUSE_SECONDS /= 10

    def failing(trainer: Trainer, *args: object) -> object:
        if trainer.progress.step == step:
            raise ArithmeticError("one too many")
        return original(trainer, *args)

    Trainer.step = failing  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("layout", some_of(["--dp 1", "--dp 2"], ["--dp 2"]))
def test_a_killed_run_begins_again_and_its_losses_are_those_of_an_undisturbed_one(tmp_path: Path, layout: str) -> None:
    argv = tiny(tmp_path / "run", f"{layout} --save-interval 2 --max-restarts 1")
    ended = run_job(argv, tmp_path, plant=kill_last_in_step, plant_args=(3, str(tmp_path / "marker")))
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


def kill_after_saves(folder: str, *steps: int) -> None:
    """The last rank is killed in the steps after these checkpoints, in each once."""
    original = Trainer.step

    def dying(trainer: Trainer, *args: object) -> object:
        mesh, step = trainer.engine.mesh, trainer.progress.step
        marker = Path(folder) / f"killed_in_{step}"
        if step - 1 in steps and mesh.world.rank == mesh.world.size - 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args)

    Trainer.step = dying  # type: ignore[method-assign,assignment]


def test_a_run_that_gets_further_begins_again_whatever_is_logged(tmp_path: Path) -> None:
    """The same sentence three times, and in between checkpoints but no logged step."""
    assert SAME_TIMES == 3
    flags = "--train-iters 36 --log-interval 50 --save-interval 6 --max-restarts 2"
    kills = 6, 18, 30
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path, plant=kill_after_saves, plant_args=(str(tmp_path), *kills))
    assert ended.status == 0, ended.errors
    # Counted from zero after ten new steps. The step after a checkpoint is known where health.json was due for it.
    told = re.findall(r"restart (\d) of 2, after step (\d+)", ended.errors)
    assert len(told) == len(kills)
    for (restart, step), kill in zip(told, kills, strict=True):
        assert restart == "1" and int(step) in (kill, kill + 1)


def test_restarts_go_back_to_a_step_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_on_ranks(tiny(run, "--train-iters 8 --save-interval 2"))
    flags = "--train-iters 12 --lr-decay-iters 6 --save-interval 2 --max-restarts 2"
    for back, kill in (("--ckpt-step 4", 8), (f"--load {run}/checkpoints/step_00000006", 10)):
        ended = run_job(
            tiny(run, f"{flags} {back}"), tmp_path, plant=kill_after_saves, plant_args=(str(tmp_path), kill)
        )
        assert ended.status == 0, ended.errors
        found = re.findall(r"continuing from \S+/step_0+(\d+)", ended.output)
        assert found == [back[-1], str(kill)], ended.output
    # Another launch goes back, and until it has saved each of its attempts does.
    back = "--ckpt-step 4 --save-interval 100"
    ended = run_job(tiny(run, f"{flags} {back}"), tmp_path, plant=kill_after_saves, plant_args=(str(tmp_path), 6))
    assert ended.status == 0, ended.errors
    assert re.findall(r"continuing from \S+/step_0+(\d+)", ended.output) == ["4", "4"]


def test_a_damaged_checkpoint_does_not_hide_that_a_launch_has_saved(tmp_path: Path) -> None:
    """A restart would go back once more, and replace what is whole of this launch."""
    train_on_ranks(tiny(tmp_path / "run", "--train-iters 4 --save-interval 2"))
    folder = tmp_path / "run" / "checkpoints"
    for name, launch in (("step_00000002", "first"), ("step_00000004", "second")):
        sums, state = Checksums.read(folder / name), json.loads((folder / name / "state.json").read_text())
        text = json.dumps(state | {"launch": launch})
        (folder / name / "state.json").write_text(text)
        sums.with_text("state.json", text).write()
    assert [_has_saved(launch, folder) for launch in ("first", "second")] == [False, True]
    (folder / "step_00000004" / "state.json").write_text("{}")
    assert [_has_saved(launch, folder) for launch in ("first", "second")] == [True, False]


def test_restarts_that_went_back_resume_from_the_copies_that_they_made(tmp_path: Path) -> None:
    """And not from one that an earlier launch has left, which knows nothing of the step that was asked for."""
    run = tmp_path / "run"
    train_on_ranks(tiny(run, "--train-iters 4 --save-interval 2"))
    copies = f"--train-iters 9 --lr-decay-iters 6 --save-replicated-interval 1 --local-save {tmp_path}/local"
    flags = f"{copies} --save-interval 100 --max-restarts 2"
    left = run_job(tiny(run, copies), tmp_path, plant=kill_after_saves, plant_args=(str(tmp_path), 6))
    assert left.status == -signal.SIGKILL, left.errors  # its last copies, of step 6 or 7, stay
    ended = run_job(
        tiny(run, f"{flags} --ckpt-step 2"), tmp_path, plant=kill_after_saves, plant_args=(str(tmp_path), 4)
    )
    assert ended.status == 0, ended.errors
    back, resumed = (int(step) for step in re.findall(r"continuing from \S+/step_0+(\d+)", ended.output))
    assert back == 2 and resumed in (4, 5)  # it was killed in the step after the fifth


def move_run(step: int, run: str) -> None:
    """The run folder is moved away in a step, once."""
    original = Trainer.step

    def moving(trainer: Trainer, *args: object) -> object:
        if trainer.progress.step == step and Path(run).exists():
            Path(run).rename(f"{run}_moved")
        return original(trainer, *args)

    Trainer.step = moving  # type: ignore[method-assign,assignment]


def test_a_run_folder_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = tiny(run, "--save-interval 2 --max-restarts 3")
    ended = run_job(argv, tmp_path, plant=move_run, plant_args=(3, str(run)))
    assert ended.status == 1 and "Traceback" not in ended.errors, ended.errors
    assert f"no restart: {run} was moved or removed while the run was in it; move it back" in ended.errors
    assert not run.exists()
    assert checkpoints_of(tmp_path / "run_moved")[-1] == "step_00000002"


def test_the_last_checkpoint_is_written_elsewhere_when_the_run_folder_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = tiny(run, f"--save {tmp_path / 'saved'} --save-interval 4")
    ended = run_job(argv, tmp_path, plant=move_run, plant_args=(3, str(run)))
    assert "Traceback" not in ended.errors, ended.errors
    assert "forecast.json was not written: No such file or directory" in ended.errors
    assert (tmp_path / "saved" / "step_00000006" / "state.json").exists()


def test_time_is_over_for_all_attempts_together(tmp_path: Path) -> None:
    flags = "--train-iters 100000 --save-interval 2 --max-restarts 3 --exit-duration-in-mins 0.1"
    begin = time.monotonic()
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path, plant=kill_late, plant_args=(str(tmp_path), 5.0))
    assert ended.status == 0 and "restart 1 of 3" in ended.errors, ended.errors
    assert "the time of --exit-duration-in-mins is over" in ended.output
    assert time.monotonic() - begin < 5 + 6  # and not 5 and then 6 seconds, with starts and saves


def kill_late(folder: str, seconds: float) -> None:
    """The only rank is killed in the first step that begins so long after the launcher's start, once."""
    original, begin = Trainer.step, time.monotonic()

    def dying(trainer: Trainer, *args: object) -> object:
        marker = Path(folder) / "killed_late"
        if time.monotonic() - begin > seconds and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args)

    Trainer.step = dying  # type: ignore[method-assign,assignment]


def test_a_temporary_directory_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    gone = {"TMPDIR": str(tmp_path / "gone")}
    code = "import tempfile; tempfile.tempdir = {!r}; from megatronish.launch.cleanup import meeting_folder\n"
    code = code.format(gone["TMPDIR"]) + "with meeting_folder(): pass"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "none can be made in" in ended.stderr and "set TMPDIR to a folder that can be written" in ended.stderr


def test_a_planned_stop_is_no_failure_whatever_its_status(tmp_path: Path) -> None:
    flags = "--dp 2 --exit-interval 3 --exit-status-if-stopped 1 --max-restarts 3"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path)
    assert (ended.status, ended.errors) == (1, "")
    assert max(steps_of(tmp_path / "run")) == 3


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


@pytest.mark.processes
def test_restarts_are_used_up_and_counted_from_zero_after_good_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    steps = Steps()
    run = Restarts(2, steps)
    assert not run.again(2, "a mistake")
    assert not run.again(130, "interrupted")
    assert run.again(1, "first")
    assert run.again(1, "second")
    assert not run.again(1, "third")
    assert "no restart: --max-restarts 2 are used up" in capsys.readouterr().err
    steps.last = GOOD_STEPS
    assert run.again(1, "first")
    assert pauses == [0, 2 * restarts.PAUSE_SECONDS, 0]  # none where there are new steps
    assert not Restarts(0, steps).again(1, "first")


@pytest.mark.processes
def test_a_call_whose_child_is_killed_is_made_again_and_one_that_never_ends_is_not() -> None:
    own = os.getpid()

    def answer() -> int:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return 7

    assert apart(60.0, answer, otherwise=0) == 7
    assert apart(0.2, partial(wait_until, lambda: False), otherwise=None) is None
