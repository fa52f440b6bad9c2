"""Tests of interrupted saves: killed at any moment, or on a full disk, a run keeps complete checkpoints and resumes."""

import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import checkpoints_of, run_job, steps_of, tiny, train_on_ranks
from planted_kills import kill_after, kill_all_in_step
from ranks import run_ranks
from saved_runs import save_value, saved_value
from sweeps import some_of

from megatronish.checkpoint.folder import remove_leftovers, remove_old
from megatronish.core.errors import RunError
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place

SIX = "--save-interval 2 --micro-batch-size 2"


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that saved at steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("six") / "run"
    train_on_ranks(tiny(run_dir, SIX))
    return run_dir


@pytest.fixture(scope="module")
def six_steps_of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on four ranks."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train_on_ranks(tiny(run_dir, f"{SIX} --tp 2 --pp 2"), world_size=4)
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
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            self.pass_by()

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.kill()


def save_and_remove(folder: Path, value: float) -> None:
    """What a run does with --keep-last 1."""
    save_value(folder, value)
    assert remove_old(folder, keep_last=1, keep_every=None) == []


def save_killed_at_every_point(place: Place, folder: Path, before: int | None) -> list[float | None]:
    """What is there after a kill at each point of a save, where a checkpoint of step `before` holds 1."""
    found = []
    for point in itertools.count(1):
        run = folder / str(point)
        if before is not None:
            save_value(run, 1.0, step=before)
        child = os.fork()
        if child == 0:
            Point(point, lambda: os.kill(os.getpid(), signal.SIGKILL)).install()
            save_and_remove(run, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        remove_leftovers(run)
        found.append(saved_value(run))
        assert not any(path.name.startswith(".") for path in run.glob("*"))
        save_and_remove(run, 3.0)  # goes on as if nothing had been
        assert saved_value(run) == 3.0
        assert sorted(path.name for path in run.iterdir()) == ["latest", "step_00000004"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError


@pytest.mark.parametrize(
    "before", some_of([None, 4, 3], [4, 3]), ids=["the-first", "another-of-the-same-step", "one-to-be-removed"]
)
def test_a_save_killed_at_any_point_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, before: int | None
) -> None:
    (found,) = run_ranks(1, save_killed_at_every_point, tmp_path, before)
    assert len(found) > 15
    arrived = found.index(2.0)
    assert found == [None if before is None else 1.0] * arrived + [2.0] * (len(found) - arrived)


def test_what_killed_saves_left_goes_with_the_next(tmp_path: Path) -> None:
    save_value(tmp_path, 1.0)
    for left in ("2.removed", "3.partial", "4.replaced", "5.partial"):
        shutil.copytree(tmp_path / "step_00000004", tmp_path / f".step_0000000{left}")
    save_value(tmp_path, 2.0, step=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004", "step_00000005"]


# A full disk


def save_on_a_full_disk(place: Place, folder: Path) -> list[tuple[str, float | None]]:
    """What the save says whose first, second, ... write finds no room, and what is loaded then; until all have room."""
    told = []
    sync = os.fsync
    for fails_at in itertools.count(1):
        run, count = folder / str(fails_at), itertools.count(1)
        save_value(run, 1.0)

        def no_room(descriptor: int, count: Iterator[int] = count, fails_at: int = fails_at) -> None:
            if next(count) == fails_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(descriptor)

        os.fsync = no_room
        try:
            save_value(run, 2.0)
        except RunError as error:
            told.append((str(error), saved_value(run)))
        else:
            return told
        finally:
            os.fsync = sync
        remove_leftovers(run)
        assert sorted(path.name for path in run.iterdir() if path.suffix != ".new") == ["latest", "step_00000004"]
    raise AssertionError


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    (told,) = run_ranks(1, save_on_a_full_disk, tmp_path)
    # Tensors, metadata, their sums, the state, all sums, the pointer; and the names of all these.
    assert len(told) > 8
    for sentence, _ in told:
        begins = r"the checkpoint of step 4 could not be written to .*: No space left on device\. Those before"
        assert re.match(begins, sentence)
    values = [value for _, value in told]
    assert values == [1.0] * values.count(1.0) + [2.0] * values.count(2.0)
    assert values.count(1.0) > 6  # only the pointer comes after the checkpoint itself


def little_room(num_bytes: int) -> None:
    """Planted in a job: a rank writes no file beyond that."""
    run = Engine.step

    def stepped(self: Engine, *arguments: Any, **options: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        return run(self, *arguments, **options)

    Engine.step = stepped  # type: ignore[method-assign]


@pytest.mark.parametrize("num_bytes", some_of([2000, 20_000, 100_000], [20_000]))
def test_whatever_file_finds_no_room_the_run_says_so(tmp_path: Path, num_bytes: int) -> None:
    """Tensors are cut short in the middle of a write, or before the first."""
    argv = tiny(tmp_path / "run", f"--train-iters 2 --save {tmp_path / 'full'}")
    ended = run_job(argv, tmp_path, plant=little_room, plant_args=(num_bytes,))
    assert ended.status == 1
    told = (
        rf"the checkpoint of step 2 could not be written to {tmp_path / 'full'}: File too large\. Those before it are"
    )
    lines = [line for line in ended.errors.splitlines() if not line.startswith("TensorBoard is off")]
    assert len(lines) == 1 and re.match(told, lines[0]), ended.errors
    assert [path.name for path in (tmp_path / "full").iterdir() if path.name != ".lock"] == []


# Whole runs


def kill_all_at(event: str, text: str, occurrence: int) -> None:
    """Planted in a job: SIGKILL to all of it when a rank meets `event` on a path with `text` in it."""
    left = [occurrence]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and any(text in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] == 0:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(audit)


KILLS: dict[str, tuple[Callable[..., None], tuple[Any, ...], int]] = {
    "in-the-first-step": (kill_all_in_step, (1,), 0),
    "in-a-later-step": (kill_all_in_step, (4,), 2),
    "while-tensors-are-written": (kill_all_at, ("open", ".step_00000004.partial/__0_0.distcp", 1), 2),
    "before-the-state": (kill_all_at, ("open", ".step_00000004.partial/state.json", 1), 2),
    "before-it-has-its-name": (kill_all_at, ("os.rename", ".step_00000004.partial/", 1), 2),
    "before-the-sums": (kill_all_at, ("open", ".step_00000004.partial/checksums.json", 2), 2),
    "before-the-pointer": (kill_all_at, ("open", "checkpoints/latest", 2), 4),
    "before-an-old-one-is-removed": (kill_all_at, ("os.rename", "checkpoints/step_00000002", 1), 4),
    "while-an-old-one-is-removed": (kill_all_at, ("os.rmdir", ".step_00000002.removed", 1), 4),
}


CASES = [
    *((moment, "") for moment in KILLS),
    *((moment, "--tp 2 --pp 2") for moment in list(KILLS)[1::3]),
    *((moment, "--async-save") for moment in list(KILLS)[2:]),
    *((moment, "--async-save --tp 2 --pp 2") for moment in list(KILLS)[3::3]),
]
# Every moment of a save is one of the points at which the test above kills a save; `make attack` kills 200 runs.
CHOSEN = [
    ("in-the-first-step", ""),
    ("in-a-later-step", "--tp 2 --pp 2"),
    ("before-the-pointer", "--async-save --tp 2 --pp 2"),
]


@pytest.mark.parametrize(("moment", "flags"), some_of(CASES, CHOSEN))
def test_a_killed_run_resumes_as_if_nothing_had_been(
    tmp_path: Path, six_steps: Path, six_steps_of_four: Path, moment: str, flags: str
) -> None:
    plant, arguments, resumed_from = KILLS[moment]
    removes = "removed" in moment
    argv = tiny(tmp_path / "run", f"{SIX} {flags} {'--keep-last 1' if removes else ''}")
    killed = run_job(argv, tmp_path, plant=plant, plant_args=arguments)
    assert killed.status == -signal.SIGKILL
    output = train_on_ranks(argv, world_size=4 if "tp" in flags else 1)
    assert "continuing from" not in output if resumed_from == 0 else f"step_{resumed_from:08d}" in output
    assert steps_of(tmp_path / "run") == steps_of(six_steps_of_four if "tp" in flags else six_steps)
    left = ["step_00000006"] if removes else ["step_00000002", "step_00000004", "step_00000006"]
    assert checkpoints_of(tmp_path / "run") == ["latest", *left]


# Something is always being written.
RESTLESS = "--micro-batch-size 2 --save-interval 1 --async-save --keep-last 2"


def assert_like_one_that_was_left_in_peace(folder: Path, flags: str, *, world_size: int, num_steps: int) -> None:
    """The run that was killed, when it has come to its end."""
    train_on_ranks(tiny(folder / "run", f"{flags} {RESTLESS}"), world_size=world_size)
    train_on_ranks(tiny(folder / "whole", f"--micro-batch-size 2 {flags}"), world_size=world_size)
    assert steps_of(folder / "run") == steps_of(folder / "whole")
    assert checkpoints_of(folder / "run") == ["latest", *(f"step_{n:08d}" for n in (num_steps - 1, num_steps))]


@pytest.mark.sweep
def test_a_run_killed_at_a_dozen_random_moments_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """In steps, in saves, and between."""
    numbers = random.Random(1)
    flags = "--num-layers 1 --train-iters 60"
    argv = tiny(tmp_path / "run", f"{flags} {RESTLESS}")
    ends = [
        run_job(argv, tmp_path, plant=kill_after, plant_args=(numbers.uniform(0.0, 0.3), None)).status
        for _ in range(12)
    ]
    assert set(ends) <= {0, -signal.SIGKILL} and ends.count(-signal.SIGKILL) >= 6
    assert_like_one_that_was_left_in_peace(tmp_path, flags, world_size=1, num_steps=60)


@pytest.mark.sweep
def test_four_ranks_killed_at_random_moments_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    """All at once, or one of them, whose launcher then ends the others while their threads write."""
    numbers = random.Random(4)
    flags = "--num-layers 1 --train-iters 16 --tp 2 --dp 2 --zero-stage 1"
    kills = 0
    for rank in (None, None, 3, None, 0):
        plant_args = (numbers.uniform(0.0, 0.8), rank)
        ended = run_job(
            tiny(tmp_path / "run", f"{flags} {RESTLESS}"), tmp_path, plant=kill_after, plant_args=plant_args
        )
        if ended.status == 0:
            break  # it was quicker
        assert ended.status == (-signal.SIGKILL if rank is None else 1), ended
        assert rank is None or f"rank {rank} failed: killed by SIGKILL" in ended.errors
        kills += 1
    assert kills >= 2
    assert_like_one_that_was_left_in_peace(tmp_path, flags, world_size=4, num_steps=16)


def test_a_run_killed_while_it_replaced_its_only_checkpoint_has_it_still(tmp_path: Path, six_steps: Path) -> None:
    """Between the two renames no folder has the checkpoint's name."""
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--micro-batch-size 2 --exit-interval 4 --save-interval 4"))
    aside = run_dir / "checkpoints" / ".step_00000004.replaced"
    (run_dir / "checkpoints" / "step_00000004").rename(aside)
    shutil.copytree(aside, aside.with_name(".step_00000004.partial"))
    assert "step_00000004" in train_on_ranks(tiny(run_dir, "--micro-batch-size 2"))
    assert steps_of(run_dir) == steps_of(six_steps)
    assert checkpoints_of(run_dir) == ["latest", "step_00000004", "step_00000006"]
