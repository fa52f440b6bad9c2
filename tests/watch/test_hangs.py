"""Tests of hangs on real processes: which rank hangs is named, and where, soon after the limit; then the run ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hangs
import pytest
from frozen_disk import disk_that_freezes
from jobs import SECONDS, run_job, started, tiny
from paths import ROOT
from ranks import wait_until
from stuck_writes import StuckWrites, can_trace

from megatronish.launch.guard import PATIENCE
from megatronish.train.folder import last_step

LIMIT = 3.0
LAYOUT = "--tp 2 --train-iters 30 --save-interval 12"


def hang(folder: Path, kind: str, *, flags: str = LAYOUT, status: int = 1, **options: Any) -> str:
    """What a run prints whose rank 1 hangs so in step 9; asserts that it was told soon, and the status."""
    began = folder / "began"
    argv = tiny(folder / "run", f"{flags} --hang-seconds {LIMIT} --hang-seconds-start 60")
    ended = run_job(argv, folder, plant=getattr(hangs, kind), plant_args=(1, 8, str(began), *options.values()))
    seconds = time.monotonic() - float(began.read_text())
    assert ended.status == status, ended.errors
    assert seconds < LIMIT + 3.0, ended.errors
    return ended.errors


@pytest.mark.sweep
def test_a_rank_that_is_stopped_is_named_with_the_collective_that_it_lacks(tmp_path: Path) -> None:
    errors = hang(tmp_path, "stopped")
    assert re.match(
        r"the run hangs: rank 1 \(tp 1\) has not entered \w+ \d+ of (tp|dp|world).* for \d s; the others wait there\. "
        r"It is silent for \d s: process \d+ on .* is stopped by a signal\. It was last seen in step \d",
        errors,
    )
    assert "--hang-seconds" in errors
    kept = json.loads((tmp_path / "run" / "logs" / "hang.json").read_text())
    assert kept["report"] == errors.strip()
    assert set(kept["ranks"]) == {"0", "1"}
    health = json.loads((tmp_path / "run" / "health.json").read_text())
    assert health["step"] == 8 and health["phase"].startswith("hangs: rank 1 (tp 1) has not entered"), health


def test_a_rank_that_hangs_in_a_layer_is_named_with_its_stack(tmp_path: Path) -> None:
    errors = hang(tmp_path, "in_layer")
    assert re.search(r"rank 1 \(tp 1\) has not entered all_reduce \d+ of tp", errors), errors
    assert "(layer 0, forward of micro-batch 0)" in errors
    assert "It is in step 9. Its stack: tests/support/hangs.py" in errors


@pytest.mark.sweep
def test_a_rank_that_waits_for_data_is_named_with_the_stack_of_its_loader(tmp_path: Path) -> None:
    errors = hang(tmp_path, "in_loader", flags=f"{LAYOUT} --num-workers 1")
    assert re.search(r"rank 1 \(tp 1\) has not entered .* It is waiting for the data of step 9", errors), errors
    assert re.search(r"The stack of the thread that it waits for: tests/support/hangs.py:\d+ sleep", errors), errors


@pytest.mark.sweep
def test_a_save_that_hangs_in_the_background_is_named(tmp_path: Path) -> None:
    errors = hang(tmp_path, "in_save", flags=f"{LAYOUT} --async-save")
    assert re.search(r"rank 1 .* is saving the checkpoint of step 12, in the background. Its stack", errors), errors


@pytest.mark.sweep
def test_a_rank_that_does_not_leave_at_the_end_is_named(tmp_path: Path) -> None:
    errors = hang(tmp_path, "at_end", flags="--tp 2 --train-iters 4")
    assert (
        f"rank 1 (tp 1) has made no progress for {LIMIT:.0f} s. It is in the end of the run (leaving the process group)"
        in errors
    )


def test_ranks_that_make_different_collectives_are_named_at_once(tmp_path: Path) -> None:
    errors = hang(tmp_path, "desync")
    begin = r"the run failed: ranks do different things: in collective \d+ of world rank 1 \(tp 1\)"
    assert re.match(begin, errors), errors
    assert "all_reduce of [3] float32, and rank 0 (tp 0) all_reduce of [6] float64" in errors


def test_a_rank_that_ends_with_zero_too_early_has_failed(tmp_path: Path) -> None:
    assert hang(tmp_path, "leaving_early") == "rank 1 failed: it ended with status 0 before the run had finished\n"
    health = json.loads((tmp_path / "run" / "health.json").read_text())
    assert health["phase"].startswith("failed: rank 1 failed: it ended with status 0"), health


def test_ranks_that_are_all_stopped_are_named_by_their_launcher(tmp_path: Path) -> None:
    errors = hang(tmp_path, "all_stopped")
    for rank in range(2):
        assert re.search(
            rf"rank {rank} \(tp {rank}\) is silent for \d s: process \d+ is stopped by a signal\. It", errors
        )
    assert errors.startswith("the run hangs: rank 0") and "--hang-seconds" in errors, errors


def test_a_single_process_that_keeps_pythons_lock_is_named_with_its_stack(tmp_path: Path) -> None:
    errors = hang(tmp_path, "keeping_the_lock", flags="--train-iters 30", status=-signal.SIGKILL)
    assert re.match(r"the run hangs: rank 0 is silent for \d s: process \d+ does not respond: native code may", errors)
    assert "Its stack: support/hangs.py" in errors, errors


def test_a_run_that_was_stopped_with_its_launcher_goes_on(tmp_path: Path) -> None:
    argv = tiny(
        tmp_path / "run",
        f"--dp 2 --train-iters 50 --hang-seconds {LIMIT} --hang-seconds-start 60 --hang-seconds-save 60",
    )
    with started(argv, tmp_path) as job:
        assert wait_until(lambda: last_step(tmp_path / "run" / "metrics.jsonl") > 2, timeout=SECONDS)
        assert job.process.pid is not None
        os.killpg(job.process.pid, signal.SIGSTOP)  # as Ctrl-Z does
        time.sleep(LIMIT + PATIENCE + 0.25)  # after which a guard that had not been stopped would end it
        os.killpg(job.process.pid, signal.SIGCONT)
        assert job.wait() == 0, job.told


def test_a_disk_that_does_not_answer_is_told_before_its_ranks_can_end_and_then_the_run_begins_again(
    tmp_path: Path,
) -> None:
    with disk_that_freezes(tmp_path) as disk:
        run = disk.folder / "run"
        flags = "--dp 2 --train-iters 100000 --save-interval 5 --max-restarts 2"
        argv = tiny(run, f"{flags} --hang-seconds {LIMIT} --hang-seconds-start 60")
        with started(argv, tmp_path) as job:
            assert wait_until(lambda: last_step(run / "metrics.jsonl") > 12, timeout=SECONDS), job.told
            with disk.frozen():
                since = time.monotonic()
                assert wait_until(lambda: "the run hangs: rank " in job.errors, timeout=SECONDS)
                assert time.monotonic() - since < LIMIT + 3.0, job.errors
                assert wait_until(lambda: "cannot be ended as long as the disk" in job.errors), job.errors
            assert wait_until(lambda: "restart 1 of 2, after step" in job.errors, timeout=SECONDS), job.errors
            job.signal(signal.SIGTERM)
            job.wait()


@pytest.mark.sweep
@pytest.mark.skipif(not can_trace(), reason="needs to trace processes")
def test_a_launcher_leaves_with_its_sentence_before_the_disk_answers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    disk = StuckWrites(run)
    argv = tiny(run, f"--dp 2 --train-iters 100000 --hang-seconds {LIMIT} --hang-seconds-start 60")
    with started(argv, tmp_path, plant=disk.is_of) as job:
        assert wait_until(lambda: last_step(run / "metrics.jsonl") > 5, timeout=SECONDS), job.told
        disk.stop()
        try:
            since = time.monotonic()
            assert wait_until(lambda: "the run hangs: rank " in job.errors, timeout=SECONDS)
            assert time.monotonic() - since < LIMIT + 3.0, job.errors
            assert job.wait() == 1
            assert re.search(r"rank 0 \(process \d+\).* cannot be ended as long as the disk", job.errors), job.errors
        finally:
            disk.answer()
        assert job.is_gone()


def test_a_reader_that_stops_reading_ends_no_run(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", f"--dp 2 --train-iters 20 --log-interval 1 --hang-seconds {LIMIT}")
    argv += ["--hang-seconds-start", "60", "--hang-seconds-save", "60"]
    ended = run_job(argv, tmp_path, plant=hangs.stalled_terminal)
    assert ended.status == 0
    assert last_step(tmp_path / "run" / "metrics.jsonl") == 20
    assert " iteration       20/      20 " in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.sweep
def test_a_rank_names_the_stopped_one_that_keeps_the_store_in_which_they_meet(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    argv = tiny(tmp_path / "run", f"--tp 2 --train-iters 100000 --hang-seconds {LIMIT} --hang-seconds-start 60")
    ranks = []
    with (tmp_path / "errors").open("w") as errors:
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv]
            environ = os.environ | meeting | place
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=errors))
    try:
        assert wait_until(lambda: last_step(tmp_path / "run" / "metrics.jsonl") > 5, timeout=SECONDS)
        ranks[0].send_signal(signal.SIGSTOP)
        since = time.monotonic()
        assert ranks[1].wait(SECONDS) == 1
        assert time.monotonic() - since < LIMIT + 3.0
    finally:
        for process in ranks:
            process.kill()
    told = (tmp_path / "errors").read_text()
    assert "the run hangs: rank 0, whose process has the store of the run, does not answer: it is stopped" in told
    assert re.search(r"rank 1 \(tp 1\) waits in \w+ \d+ of (tp|dp|world)", told), told
