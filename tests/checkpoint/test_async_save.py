"""Tests of asynchronous saving: its checkpoints equal those that training would have stopped for."""

import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import checkpoints_of, run_job, started, steps_of, tiny, train_on_ranks
from ranks import wait_until
from saved_runs import alone, assert_same_bits
from sweeps import some_of

from megatronish.checkpoint import storage
from megatronish.checkpoint.save import HostCopies, in_background
from megatronish.engine.engine import Engine
from megatronish.train.hooks.save import FinishedSave, Save

FAILED = "could not be written to .*: File too large. Those before it are whole"


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step_{number:08d}"


def write_slowly(seconds: float, after_step: int = 0) -> None:
    """Planted in a job: a file of tensors takes so long, and is not begun before that step is computed.

    The watchdog looks for whichever thread writes.
    """
    save, run, write, computed = torch.save, Engine.step, Save._write, threading.Event()
    begun: set[object] = set()

    def slow(found: object, stream: object) -> None:
        assert threading.current_thread().name == "save"
        if stream not in begun:
            begun.add(stream)
            assert after_step == 0 or computed.wait(60)
            time.sleep(seconds)
        save(found, stream)

    def stepped(self: Engine, *arguments: object, num_steps_done: int, **options: object) -> object:
        result = run(self, *arguments, num_steps_done=num_steps_done, **options)
        if num_steps_done + 1 == after_step:
            computed.set()
        return result

    def watched(self: Save, *arguments: Any) -> FinishedSave:
        assert threading.get_ident() in self.mesh.record.phases
        return write(self, *arguments)

    storage.torch.save = slow  # type: ignore[attr-defined]
    Engine.step = stepped  # type: ignore[assignment, method-assign]
    Save._write = watched  # type: ignore[method-assign]


def no_room(steps: range, rank: int = 0) -> None:
    """Planted in a job: for what is saved after these steps a rank has no room."""
    run, room = Engine.step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def stepped(self: Engine, *arguments: object, num_steps_done: int, **options: object) -> object:
        result = run(self, *arguments, num_steps_done=num_steps_done, **options)
        while any(thread.name == "save" for thread in threading.enumerate()):
            time.sleep(0.01)
        if self.mesh.world.rank == rank:
            limit = 60_000 if num_steps_done + 1 in steps else room[0]  # one rank's tensors take more, all else less
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, room[1]))
        return result

    Engine.step = stepped  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("flags", "world_size"),
    some_of(
        [
            ("--bf16", 1),
            ("--tp 2 --optimizer sgd", 2),
            ("--dp 2 --zero-stage 1", 2),
            ("--pp 2 --dp 2 --zero-stage 3 --bf16", 4),
        ],
        [("--pp 2 --dp 2 --zero-stage 3 --bf16", 4)],
    ),
)
def test_each_checkpoint_is_what_training_would_have_stopped_for(tmp_path: Path, flags: str, world_size: int) -> None:
    """Though training goes on and changes every tensor while they are written."""
    for name, extra in (("sync", ""), ("async", "--async-save")):
        train_on_ranks(
            tiny(tmp_path / name, f"{flags} {extra} --train-iters 3 --save-interval 1"), world_size=world_size
        )
    assert checkpoints_of(tmp_path / "sync") == checkpoints_of(tmp_path / "async")
    assert steps_of(tmp_path / "sync") == steps_of(tmp_path / "async")
    for number in range(1, 4):
        assert_same_bits(step(tmp_path / "sync", number), step(tmp_path / "async", number))
    assert (tmp_path / "async" / "checkpoints" / "latest").read_text() == "step_00000003\n"


def test_training_goes_on_meanwhile_and_one_save_waits_for_the_other(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--async-save --save-interval 3 --train-iters 7 --exit-interval 6 --tp 2")
    ended = run_job(argv, tmp_path, plant=write_slowly, plant_args=(0.5, 6))
    assert ended.status == 0, ended
    told = re.sub(r"\d\.\d+ s", "_ s", ended.output)
    told = [re.match(r" \[.*iteration +(\d)", line)[1] if "iteration" in line else line for line in told.splitlines()]
    told = [line for line in told[told.index("1") :] if not line.startswith((" forecast:", " goodput"))]
    saved = [f" saved {step(tmp_path / 'run', n)} in _ s in the background; training paused for _ s" for n in (3, 6)]
    waited = [f" waited _ s for the checkpoint of step {n} to be written" for n in (3, 6)]
    stopped = "stopped after step 6 of 7: --exit-interval is reached; start again to resume"
    # Steps 4 to 6 were computed while step 3 was written; step 6 waited for that, and the end for step 6.
    assert told == ["1", "2", "3", "4", "5", "6", saved[0], waited[0], saved[1], waited[1], stopped]
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000003", "step_00000006"]


@pytest.mark.parametrize(("layout", "rank"), some_of([("", 0), ("--tp 2", 1)], [("--tp 2", 1)]))
def test_a_failed_write_is_told_and_tried_again(tmp_path: Path, layout: str, rank: int) -> None:
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, f"--async-save --save-interval 2 --train-iters 8 --keep-last 2 {layout}")
    ended = run_job(argv, tmp_path, plant=no_room, plant_args=(range(4, 8), rank))
    assert ended.status == 0, ended
    told = [line for line in ended.errors.splitlines() if line]
    assert len(told) == 2, told
    for number, line in zip((4, 6), told, strict=True):
        assert re.fullmatch(f"the checkpoint of step {number} {FAILED}; training continues, and the next .*", line)
    assert len(steps_of(run_dir)) == 8
    # What was good stayed until something newer took its place.
    assert checkpoints_of(run_dir) == ["latest", "step_00000002", "step_00000008"]


@pytest.mark.parametrize("flags", some_of(["", "--async-save", "--async-save --tp 2"], ["--async-save --tp 2"]))
def test_the_last_save_must_succeed(tmp_path: Path, flags: str) -> None:
    run_dir = tmp_path / "run"
    rank = 1 if "tp" in flags else 0
    argv = tiny(run_dir, f"--save-interval 2 --train-iters 4 {flags}")
    ended = run_job(argv, tmp_path, plant=no_room, plant_args=(range(3, 9), rank))
    assert ended.status == 1 and "Traceback" not in ended.errors, ended
    last = ended.errors.strip().splitlines()[-1]
    remedy = r"raise the limit on the size of a file \(ulimit -f unlimited\) and start again, or name another"
    assert re.search(f"the checkpoint of step 4 {FAILED}; {remedy}", last), last
    assert ended.errors.count("ulimit -f") == 1
    assert checkpoints_of(run_dir) == ["latest", "step_00000002"]
    # There is room again, and nothing was lost.
    train_on_ranks(argv, world_size=1 + rank)
    assert checkpoints_of(run_dir) == ["latest", "step_00000002", "step_00000004"]


def fail_in_step(number: int) -> None:
    """Planted in a job: a bug, while the checkpoint before is being written."""
    write_slowly(0.5)
    clip, left = Engine.clip, [number]

    def clip_or_raise(self: Engine, grad_norm: float) -> float:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("a bug")
        return clip(self, grad_norm)

    Engine.clip = clip_or_raise  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", some_of(["", "--pp 2"], ["--pp 2"]))
def test_a_run_that_fails_finishes_the_checkpoint_that_it_was_writing(tmp_path: Path, layout: str) -> None:
    argv = tiny(tmp_path / "run", f"--async-save --save-interval 2 {layout}")
    ended = run_job(argv, tmp_path, plant=fail_in_step, plant_args=(3,))
    assert ended.status == 1 and "a bug" in ended.errors
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000002"]


def test_sigterm_while_a_checkpoint_is_written_saves_and_leaves(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, "--async-save --save-interval 1 --train-iters 2000 --keep-last 1")
    with started(argv, tmp_path, plant=write_slowly, plant_args=(0.2,)) as job:
        assert wait_until(lambda: (run_dir / "checkpoints" / "latest").exists(), timeout=60)
        job.signal(signal.SIGTERM)
        assert job.wait() == 0, job.told
    (last,) = re.findall(r"stopped after step (\d+) of 2000: SIGTERM", job.output)
    assert checkpoints_of(run_dir) == ["latest", f"step_{int(last):08d}"]


def test_copies_are_of_the_moment_and_their_room_is_used_again() -> None:
    copies = HostCopies()
    tensors = {"a": alone(torch.ones(3)), "b": alone(torch.zeros(2, 2))}
    first = copies.of(tensors)
    tensors["a"].local.fill_(2.0)
    assert first["a"].local.tolist() == [1.0] * 3
    places = {name: tensor.local.data_ptr() for name, tensor in first.items()}
    second = copies.of(tensors)
    assert second["a"].local.tolist() == [2.0] * 3
    assert {name: tensor.local.data_ptr() for name, tensor in second.items()} == places


def test_what_happens_in_the_background_is_told_when_asked() -> None:
    assert in_background(lambda: threading.current_thread().name).result() == "save"
    with pytest.raises(SystemExit):
        in_background(lambda: sys.exit(3)).result()
