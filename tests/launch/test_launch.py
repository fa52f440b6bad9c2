"""Tests of launching: real launchers, ranks and signals. A launcher here is forked from the warm server of ranks.py."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import (
    Starter,
    everybody_misses_a_file,
    last_rank_raises,
    linger,
    looks_often,
    rank_one_exits,
    rank_one_gets_a_signal_without_a_name,
    rank_one_is_killed,
    rank_one_meets_a_bus_error,
    rank_zero_is_stopped_at_its_end,
    rank_zero_returns_three,
    save_on_sigterm,
    stubborn,
    sum_of_ranks,
)
from ranks import is_running, wait_until

from megatronish.core.errors import UserError
from megatronish.launch.local import launch
from megatronish.launch.place import Place


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.end()


# ---- a plain start


def test_eight_ranks_start_meet_and_end_in_about_a_second(start: Starter) -> None:
    begin = time.perf_counter()
    launcher = start(8, sum_of_ranks)
    assert launcher.wait() == 0
    assert time.perf_counter() - begin < 10  # 0.3 s from this warm launcher on two idle cores; importing torch took 1 s
    assert launcher.output == "the sum is 28, on 1 thread\n"


def test_every_rank_has_a_log_and_rank_zero_keeps_the_terminal(start: Starter) -> None:
    launcher = start(2, sum_of_ranks)
    assert launcher.wait() == 0
    assert launcher.log(0) == launcher.output == "the sum is 1, on 1 thread\n"
    assert launcher.log(1) == "the sum is 1, on 1 thread\nrank 1 wrote past Python\n"
    assert launcher.errors == "rank 0 wrote past Python\n"


def test_ranks_can_be_spawned_where_forking_is_unsafe(start: Starter) -> None:
    launcher = start(2, sum_of_ranks, start_method="spawn")
    assert launcher.wait() == 0
    assert launcher.output == "the sum is 1, on 1 thread\n"


def test_a_single_rank_runs_in_the_starting_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen: list[tuple[int, Place]] = []

    def note(place: Place) -> int:
        seen.append((os.getpid(), place))
        print("alone")
        return 0

    assert launch(note, world_size=1, log_dir=tmp_path) == 0
    assert seen == [(os.getpid(), Place(0, 1, 0, 1, None))]
    assert capsys.readouterr().out == (tmp_path / "rank_0.log").read_text() == "alone\n"


def test_a_single_rank_ends_with_the_status_and_message_of_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(everybody_misses_a_file, world_size=1) == 2
    assert capsys.readouterr().err == "data_path=/nowhere does not exist; run `make data` first\n"
    assert launch(lambda _: 1 // 0, world_size=1) == 1
    assert capsys.readouterr().err.endswith("ZeroDivisionError: integer division or modulo by zero\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_log_that_finds_no_room_ends_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")

    def speak(place: Place) -> int:
        print("spoken")
        raise UserError("a sentence")

    assert launch(speak, world_size=1, log_dir=tmp_path) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("spoken\n", "a sentence\n")


def test_a_log_folder_that_cannot_be_written_is_the_users_to_mend(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert launch(sum_of_ranks, world_size=1, log_dir=tmp_path / "file" / "logs") == 2
    assert "cannot write the log" in capsys.readouterr().err


# ---- failures


def test_a_rank_that_raises_ends_the_run_with_its_traceback_alone(start: Starter) -> None:
    launcher = start(4, last_rank_raises)
    assert launcher.wait() == 1
    assert launcher.errors.startswith("rank 3 failed: Traceback (most recent call last):\n")
    assert launcher.errors.endswith("ArithmeticError: one too many\n")
    assert launcher.errors.count("Traceback") == 1
    assert "ArithmeticError: one too many" in launcher.log(3)


def test_a_rank_that_is_killed_is_the_culprit_and_not_its_victims(start: Starter) -> None:
    launcher = start(4, rank_one_is_killed)
    assert launcher.wait() == 1
    assert launcher.errors == "rank 1 failed: killed by SIGKILL (by hand, or because memory ran out)\n"


def test_a_real_time_signal_has_its_number_for_a_name(start: Starter) -> None:
    launcher = start(2, rank_one_gets_a_signal_without_a_name)
    assert launcher.wait() == 1
    assert launcher.errors == "rank 1 failed: killed by signal 50\n"


def test_a_rank_that_read_beyond_a_file_is_told_with_the_probable_cause(start: Starter) -> None:
    launcher = start(2, rank_one_meets_a_bus_error)
    assert launcher.wait() == 1
    told = r"rank 1 failed: killed by SIGBUS \(.* cut short, of --data-path or its cache; or /dev/shm .* is full:"
    assert re.match(told, launcher.errors)


def test_a_rank_that_is_stopped_after_the_others_have_finished_is_named(start: Starter) -> None:
    """No other rank is left whose watchdog could tell."""
    launcher = start(2, rank_zero_is_stopped_at_its_end, plant=looks_often)
    assert launcher.wait() == 1
    told = r"rank 0 failed: process \d+ is stopped by a signal, and ranks that were with it have finished\n"
    assert re.fullmatch(told, launcher.errors)


def test_a_rank_that_exits_ends_the_run_with_its_status(start: Starter) -> None:
    launcher = start(2, rank_one_exits)
    assert launcher.wait() == 7
    assert launcher.errors == "rank 1 failed: sys.exit(7) was called\n"


def test_a_mistake_of_the_user_is_told_once_without_a_traceback(start: Starter) -> None:
    launcher = start(4, everybody_misses_a_file)
    assert launcher.wait() == 2
    assert re.fullmatch(r"rank \d failed: data_path=/nowhere does not exist; run `make data` first\n", launcher.errors)


def test_a_rank_that_returns_a_status_ends_the_others_silently(start: Starter) -> None:
    launcher = start(2, rank_zero_returns_three)
    assert launcher.wait() == 3
    assert launcher.errors == ""


# ---- signals


def test_a_killed_launcher_leaves_no_rank_behind(start: Starter) -> None:
    launcher = start(3, linger)
    assert wait_until(lambda: all(launcher.log(rank) for rank in range(3)))
    launcher.signal(signal.SIGKILL)
    assert wait_until(lambda: not any(is_running(int(launcher.log(rank))) for rank in range(3)))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_reaches_every_rank_and_saving_is_no_failure(start: Starter, signum: int) -> None:
    launcher = start(2, save_on_sigterm)
    assert wait_until(lambda: all(launcher.log(rank) for rank in range(2)))
    launcher.signal(signum)
    assert launcher.wait() == 0
    assert [launcher.log(rank) for rank in range(2)] == [f"ready\nsaved on {signal.Signals(signum).name}\n"] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_interrupt_asks_to_save_and_leave(start: Starter, world_size: int) -> None:
    launcher = start(world_size, save_on_sigterm)
    assert wait_until(lambda: all(launcher.log(rank) for rank in range(world_size)))
    launcher.signal(signal.SIGINT)
    assert launcher.wait() == 0
    assert launcher.output == "ready\nsaved on SIGTERM\n"
    assert launcher.errors == "interrupted: saving before leaving; press Ctrl-C again to leave at once\n"


def test_the_second_interrupt_ends_at_once(start: Starter) -> None:
    launcher = start(2, stubborn)
    assert wait_until(lambda: all(launcher.log(rank) for rank in range(2)))
    launcher.signal(signal.SIGINT)
    assert wait_until(lambda: "press Ctrl-C again" in launcher.errors)
    launcher.signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert "failed" not in launcher.errors


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_cannot_save_yet_are_stopped_by_the_signal(start: Starter, signum: int) -> None:
    launcher = start(2, linger)
    assert wait_until(lambda: all(launcher.log(rank) for rank in range(2)))
    launcher.signal(signum)
    assert launcher.wait() == 128 + signum
    assert launcher.errors.endswith(f"stopped by {signal.Signals(signum).name} before it could save\n")
