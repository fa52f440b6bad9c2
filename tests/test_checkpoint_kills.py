"""Killed at any moment, or without room on the disk, a run keeps its checkpoints whole and goes on from them."""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import checkpoints_of, run_job, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import save_value, saved_value

from megatronish.checkpoint.folder import remove_leftovers
from megatronish.errors import RunError
from megatronish.launch.place import Place
from megatronish.train.engine import Engine


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that saved at steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("six") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2"))
    return run_dir


@pytest.fixture(scope="module")
def six_steps_of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on four ranks."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2 --tp 2 --pp 2"), world_size=4)
    return run_dir


class Point:
    """Counts what a save does to the disk, and kills this process at event number `at`."""

    def __init__(self, at: int, kill: Callable[[], None]) -> None:
        self.left, self.kill = at, kill

    def install(self) -> None:
        sys.addaudithook(self.audit)
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.pass_by()
            fsync(descriptor)

        os.fsync = counted  # type: ignore[assignment]

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            self.pass_by()

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.kill()


def save_killed_at_every_point(place: Place, folder: Path, before: float | None) -> list[float | None]:
    """What is there after a kill at each point of a save over `before`."""
    found = []
    for point in itertools.count(1):
        run = folder / str(point)
        if before is not None:
            save_value(run, before)
        child = os.fork()
        if child == 0:
            Point(point, lambda: os.kill(os.getpid(), signal.SIGKILL)).install()
            save_value(run, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        remove_leftovers(run)
        found.append(saved_value(run))
        assert not any(path.name.startswith(".") for path in run.glob("*"))
        save_value(run, 3.0)  # goes on as if nothing had been
        assert saved_value(run) == 3.0
        assert sorted(path.name for path in run.iterdir()) == ["latest", "step_00000004"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError


@pytest.mark.parametrize("before", [None, 1.0], ids=["the-first", "another-of-the-same-step"])
def test_a_save_killed_at_any_point_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, before: float | None
) -> None:
    (found,) = run_ranks(1, save_killed_at_every_point, tmp_path, before)
    assert len(found) > 15
    arrived = found.index(2.0)
    assert found == [before] * arrived + [2.0] * (len(found) - arrived)


def save_on_a_full_disk(place: Place, folder: Path, fails_at: int) -> tuple[str, float | None, list[str]]:
    """What the save says whose write number `fails_at` finds no room, what is loaded then, and what is left."""
    save_value(folder, 1.0)
    count, sync = itertools.count(1), os.fsync

    def no_room(descriptor: int) -> None:
        if next(count) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = no_room
    try:
        save_value(folder, 2.0)
    except RunError as error:
        return str(error), saved_value(folder), sorted(path.name for path in folder.iterdir())
    finally:
        os.fsync = sync
    raise AssertionError


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path, fails_at: int) -> None:
    ((sentence, value, left),) = run_ranks(1, save_on_a_full_disk, tmp_path, fails_at)
    assert re.match(
        r"the checkpoint of step 4 could not be written to .*: No space left on device\. Those before", sentence
    )
    assert value == 1.0
    assert left == ["latest", "step_00000004"]


def kill_all_at(event: str, text: str, occurrence: int) -> None:
    """Planted in a job: SIGKILL to all of it when a rank meets `event` on a path with `text` in it."""
    left = [occurrence]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and any(text in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] == 0:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(audit)


def kill_all_in_step(number: int) -> None:
    """Planted in a job: SIGKILL to all of it in the middle of a step."""
    clip, left = Engine.clip, [number]

    def clip_or_die(self: Engine, grad_norm: float) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.killpg(0, signal.SIGKILL)
        clip(self, grad_norm)

    Engine.clip = clip_or_die  # type: ignore[method-assign]


KILLS: dict[str, tuple[Callable[..., None], tuple[Any, ...], int]] = {
    "in-the-first-step": (kill_all_in_step, (1,), 0),
    "in-a-later-step": (kill_all_in_step, (4,), 2),
    "while-tensors-are-written": (kill_all_at, ("open", ".step_00000004.partial/__0_0.distcp", 1), 2),
    "before-the-state": (kill_all_at, ("open", ".step_00000004.partial/state.json", 1), 2),
    "before-it-has-its-name": (kill_all_at, ("os.rename", ".step_00000004.partial/", 1), 2),
    "before-the-pointer": (kill_all_at, ("open", "checkpoints/latest", 2), 4),
}


@pytest.mark.parametrize(
    ("moment", "layout"),
    [
        *((moment, "") for moment in KILLS),
        *((moment, "--tp 2 --pp 2") for moment in list(KILLS)[1::2]),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_been(
    tmp_path: Path, six_steps: Path, six_steps_of_four: Path, moment: str, layout: str
) -> None:
    plant, arguments, resumed_from = KILLS[moment]
    argv = tiny(tmp_path / "run", f"--save-interval 2 {layout}")
    killed = run_job(argv, tmp_path, plant=plant, plant_args=arguments)
    assert killed.status == -signal.SIGKILL
    output = train_on_ranks(argv, world_size=4 if layout else 1)
    assert "continuing from" not in output if resumed_from == 0 else f"step_{resumed_from:08d}" in output
    assert steps_of(tmp_path / "run") == steps_of(six_steps_of_four if layout else six_steps)
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000002", "step_00000004", "step_00000006"]


def test_a_run_killed_while_it_replaced_its_only_checkpoint_has_it_still(tmp_path: Path, six_steps: Path) -> None:
    """Between the two renames no folder has the checkpoint's name."""
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--exit-interval 4 --save-interval 4"))
    aside = run_dir / "checkpoints" / ".step_00000004.replaced"
    (run_dir / "checkpoints" / "step_00000004").rename(aside)
    shutil.copytree(aside, aside.with_name(".step_00000004.partial"))
    assert "step_00000004" in train_on_ranks(tiny(run_dir))
    assert steps_of(run_dir) == steps_of(six_steps)
    assert checkpoints_of(run_dir) == ["latest", "step_00000004", "step_00000006"]
