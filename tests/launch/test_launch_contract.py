"""Tests of the launch contract (docs/LAUNCH.md) that no other file has: exit statuses, pods without a shared disk."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import SECONDS, Job, call_main, run_job, started, steps_of, tiny, train_on_ranks
from ranks import wait_until
from sweeps import further
from torchrun import as_pod, torchrun

from megatronish.checkpoint.folder import whole_attempts
from megatronish.core.errors import RunError
from megatronish.core.remote import RemotePath
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.launch.rank import run_here

ENDLESS = "--train-iters 100000 --lr-decay-style constant"


def fail_at(step: int) -> None:
    """Planted in a job: a bug, or a broken machine, in that step."""
    run = Engine.step

    def stepped(self: Engine, *arguments: Any, num_steps_done: int, **options: Any) -> Any:
        if num_steps_done + 1 == step:
            raise ArithmeticError("broken")
        return run(self, *arguments, num_steps_done=num_steps_done, **options)

    Engine.step = stepped  # type: ignore[assignment, method-assign]


def has_steps(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(steps_of(run_dir)) > 1


def last_word(run_dir: Path) -> tuple[int, str]:
    """Step and phase of health.json."""
    said = json.loads((run_dir / "health.json").read_text())
    return said["step"], said["phase"]


def test_the_exit_status_says_whether_another_start_will_help(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--tp 2 --train-iters 4 --save-interval 1")
    failed = run_job(argv, tmp_path, plant=fail_at, plant_args=(3,))
    assert failed.status == 1 and "broken" in failed.errors  # retry
    step, phase = last_word(tmp_path / "run")
    assert step == 2 and re.fullmatch("failed: rank [01] failed: ArithmeticError: broken", phase), phase
    alone = tiny(tmp_path / "run", "--train-iters 4 --save-interval 1")
    wrong = call_main([*alone, "--load", "/nowhere"])
    assert wrong.status == 0, wrong  # the run has begun: its own checkpoints come first
    again = call_main(alone)
    assert again.status == 0 and "finished already: 4 steps of 4 are done" in again.output  # done
    assert last_word(tmp_path / "run") == (4, "finished")
    never = call_main(tiny(tmp_path / "other", "--load /nowhere"))
    assert never.status == 2 and "holds no checkpoint" in never.errors  # never
    step, phase = last_word(tmp_path / "other")
    assert step == 0 and re.match("failed: .*/nowhere holds no checkpoint", phase)


def test_a_rank_that_is_killed_is_the_last_word_of_its_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(tiny(run_dir, f"--dp 2 {ENDLESS}"), tmp_path) as job:
        assert wait_until(lambda: has_steps(run_dir), timeout=SECONDS)
        os.kill(json.loads((run_dir / "health.json").read_text())["pid"], signal.SIGKILL)
        assert job.wait() == 1, job.told
    step, phase = last_word(run_dir)
    assert step > 0 and phase.startswith("failed: rank 0 failed: killed by SIGKILL"), phase


def failing_rank(argv: list[str]) -> int:
    """Main function of a job: a rank that fails, on one of two machines."""

    def fail(_place: Place) -> int:
        Path(argv[0]).touch()
        raise RunError("the other machine has ended")

    local_rank = int(argv[1])
    return run_here(fail, Place(local_rank, 4, local_rank, 2), None)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_machine_speaks_before_its_agent_ends_it(tmp_path: Path, local_rank: int) -> None:
    with started([str(tmp_path / "failing"), str(local_rank)], tmp_path, main=failing_rank) as job:
        assert wait_until((tmp_path / "failing").exists, timeout=SECONDS)
        time.sleep(0.2)
        job.signal(signal.SIGTERM)  # of an agent that has lost its store, or another rank
        status = job.wait()
    said = (1, "rank 0 failed: the other machine has ended\n")
    assert (status, job.errors) == (said if local_rank == 0 else (-signal.SIGTERM, ""))


@pytest.mark.parametrize(("flags", "status"), [further(("--tp 2", 0)), ("--tp 2 --exit-status-if-stopped 143", 143)])
def test_a_run_that_was_asked_to_leave_says_so_by_its_status(tmp_path: Path, flags: str, status: int) -> None:
    run_dir = tmp_path / "run"
    with started(tiny(run_dir, f"{flags} {ENDLESS}"), tmp_path) as job:
        assert wait_until(lambda: has_steps(run_dir), timeout=SECONDS)
        job.signal(signal.SIGTERM)
        assert job.wait() == status, job.told
        assert job.errors.strip() in ("", "interrupted") and "SIGTERM or Ctrl-C asked for it" in job.output
    (last,) = re.findall(r"stopped after step (\d+)", job.output)
    assert last_word(run_dir) == (int(last), "stopped: SIGTERM or Ctrl-C asked for it")
    assert list((run_dir / "checkpoints").glob("step_*")) == [run_dir / "checkpoints" / f"step_{int(last):08d}"]


def test_a_finished_run_has_status_zero_whatever_a_stopped_one_has(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", "--train-iters 2 --exit-status-if-stopped 143"), tmp_path)
    assert ended.status == 0, ended


@contextlib.contextmanager
def pods(argv: list[str], folder: Path) -> Iterator[list[Job]]:
    """Two pods as Kubeflow starts them: torchrun, to which PET_ variables say all; each in a folder of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    said = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    with contextlib.ExitStack() as stack:
        jobs = []
        for number in range(2):
            own = folder / f"pod_{number}"
            own.mkdir()
            environ = said | {"PET_NODE_RANK": str(number), "GLOO_SOCKET_IFNAME": loopback}
            plant = {"plant": as_pod, "plant_args": (own, environ)}
            jobs.append(stack.enter_context(started(["--", *argv], folder, main=torchrun, **plant)))
        yield jobs


def test_pods_share_nothing_but_the_checkpoints_and_save_when_they_are_evicted(tmp_path: Path) -> None:
    save = RemotePath((tmp_path / "store").as_uri())
    flags = f"--save {save} --dp 2 --zero-stage 1 --async-save --save-interval 2 --keep-last 2"
    with pods(tiny(Path("run"), f"{flags} {ENDLESS}"), tmp_path) as jobs:
        assert wait_until(lambda: bool(whole_attempts(save)), timeout=SECONDS), jobs[0].told
        for job in jobs:
            job.signal(signal.SIGTERM)
        for job in jobs:
            assert job.wait() not in (0, 2), job.told  # torchrun itself: it was ended by a signal
        told = jobs[0].output
    (last,) = re.findall(r"stopped after step (\d+)", told)
    assert max(whole_attempts(save)) == int(last) == max(steps_of(tmp_path / "pod_0" / "run"))
    assert not (tmp_path / "pod_1" / "run" / "metrics.jsonl").exists()
    # Another machine, of another number of ranks, resumes from there; data and losses are those of one undisturbed run.
    more = int(last) + 2
    argv = tiny(tmp_path / "third", f"--save {save} --lr-decay-style constant --train-iters {more}")
    assert f"continuing from {save}/step_{int(last):08d}" in train_on_ranks(argv)
    train_on_ranks(tiny(tmp_path / "whole", f"--lr-decay-style constant --train-iters {more}"))
    whole, parts = steps_of(tmp_path / "whole"), steps_of(tmp_path / "third")
    assert list(parts) == [more - 1, more]
    for step, seen in parts.items():
        assert seen == pytest.approx(whole[step], rel=1e-4)
