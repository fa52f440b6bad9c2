"""Tests of launching: real launchers, ranks and signals. A launcher here is forked from the warm server of ranks.py."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import is_running, wait_until, warm_context

from megatronish.errors import UserError
from megatronish.launch.local import launch, run_local_ranks
from megatronish.launch.place import Place, place_from_environment, threads_per_rank
from megatronish.launch.slurm import expand_hosts

# ---- what ranks do in these tests


def join(place: Place) -> None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    dist.barrier()


def sum_of_ranks(place: Place) -> int:
    join(place)
    x = torch.tensor([place.rank])
    dist.all_reduce(x)
    print(f"the sum is {x.item()}, on {torch.get_num_threads()} thread")
    os.write(2, f"rank {place.rank} wrote past Python\n".encode())
    return 0


def last_rank_raises(place: Place) -> int:
    join(place)
    if place.rank == place.world_size - 1:
        raise ArithmeticError("one too many")
    dist.barrier()
    return 0


def rank_one_is_killed(place: Place) -> int:
    join(place)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def rank_one_exits(place: Place) -> int:
    join(place)
    if place.rank == 1:
        sys.exit(7)
    dist.barrier()
    return 0


def everybody_misses_a_file(place: Place) -> int:
    raise UserError("data_path=/nowhere does not exist; run `make data` first")


def rank_zero_returns_three(place: Place) -> int:
    if place.rank == 0:
        return 3
    time.sleep(60)
    return 0


def linger(place: Place) -> int:
    print(os.getpid(), flush=True)
    time.sleep(60)
    return 0


def save_on_sigterm(place: Place) -> int:
    """A trainer in small: goes on until it is told to save and leave."""
    told: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda number, _: told.append(number))
    print("ready", flush=True)
    while not told:
        time.sleep(0.01)
    print(f"saved on {signal.Signals(told[0]).name}")
    return 0


def stubborn(place: Place) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)
    return linger(place)


# ---- launchers


class Launcher(NamedTuple):
    """A launcher in a process of its own, what it printed going to files."""

    process: BaseProcess
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank_{rank}.log"
        return path.read_text() if path.exists() else ""

    def signal(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def wait(self) -> int | None:
        self.process.join(30)
        return self.process.exitcode


class Starter:
    """Starts launchers in a folder each, and ends those that a failing test left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launchers: list[Launcher] = []

    def __call__(
        self, world_size: int, function: Callable[[Place], int], *, start_method: str = "", **environ: str
    ) -> Launcher:
        folder = self._folder / str(len(self._launchers))
        folder.mkdir()
        process = warm_context().Process(
            target=_be_launcher, args=(folder, world_size, function, start_method, environ)
        )
        process.start()
        self._launchers.append(Launcher(process, folder))
        return self._launchers[-1]

    def end(self) -> None:
        for launcher in self._launchers:
            launcher.process.kill()
            launcher.process.join()


def _be_launcher(
    folder: Path, world_size: int, function: Callable[[Place], int], start_method: Any, environ: dict[str, str]
) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if start_method:
        sys.exit(run_local_ranks(function, world_size=world_size, log_dir=folder / "logs", start_method=start_method))
    sys.exit(launch(function, world_size=world_size, log_dir=folder / "logs"))


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


# ---- torchrun and SLURM

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[08-09,12]-ib",
    "SLURM_JOB_ID": "1000",
    "SLURMD_NODENAME": "gpu09",
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_without_variables_it_is_a_plain_start() -> None:
    assert place_from_environment({}) is None


def test_torchrun_gives_a_place() -> None:
    under_torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert place_from_environment(under_torchrun) == Place(5, 8, 1, 4, "env://")
    assert place_from_environment(SLURM | under_torchrun) == Place(5, 8, 1, 4, "env://")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_half_of_torchruns_variables_are_refused_by_name(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UserError, match=rf"lacks {missing}: torchrun sets all of them"):
        place_from_environment(environ)


def test_broken_variables_are_refused_with_their_value() -> None:
    with pytest.raises(UserError, match="RANK=five must be a whole number"):
        place_from_environment(TORCHRUN | {"RANK": "five"})
    with pytest.raises(UserError, match="rank=8 must be at least 0 and below world_size=8"):
        place_from_environment(TORCHRUN | {"RANK": "8"})
    with pytest.raises(UserError, match="local_world_size=4 exceeds world_size=3"):
        place_from_environment(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "3"})
    with pytest.raises(UserError, match=r"SLURM_STEP_TASKS_PER_NODE=two must look like 4 or 2\(x3\),1"):
        place_from_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"})
    with pytest.raises(UserError, match=r"SLURM_PROCID=3 says .* lacks SLURM_LOCALID: start with srun"):
        place_from_environment({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"})


def test_srun_gives_a_place_and_the_first_host_is_where_ranks_meet() -> None:
    assert place_from_environment(SLURM) == Place(3, 5, 1, 2, "tcp://gpu08-ib:23002", may_see_own_device=True)
    other = place_from_environment(SLURM | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert other == Place(4, 5, 0, 1, "tcp://gpu08-ib:23002", may_see_own_device=True)
    given = place_from_environment(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert given is not None
    assert given.rendezvous == "tcp://10.0.0.1:4000"


def test_a_bare_slurm_environment_will_do() -> None:
    bare = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}
    assert place_from_environment(bare | {"MASTER_PORT": "4000"}) == Place(
        1, 4, 1, 2, "tcp://a1:4000", may_see_own_device=True
    )
    with pytest.raises(UserError, match="neither MASTER_PORT nor SLURM_JOB_ID is set"):
        place_from_environment(bare)


def test_inside_a_job_without_srun_it_is_a_plain_start() -> None:
    assert place_from_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None
    assert place_from_environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert place_from_environment(batch_script) is None


def test_slurms_node_lists_are_read() -> None:
    assert expand_hosts("node[01-03,07],x5") == ["node01", "node02", "node03", "node07", "x5"]
    assert expand_hosts("r[0-1]n[9-10]") == ["r0n9", "r0n10", "r1n9", "r1n10"]
    assert expand_hosts("login.cluster") == ["login.cluster"]
    for broken in ("n[1-3", "n]1[", "n[a-b]", "n[1-]", "a,,b", ""):
        with pytest.raises(UserError, match=r"cannot read the SLURM node list .* set MASTER_ADDR"):
            expand_hosts(broken)


def test_threads_are_one_per_rank_unless_the_user_or_solitude_says_otherwise() -> None:
    assert threads_per_rank({}, 8) == 1
    assert threads_per_rank({}, 1) is None
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 8) is None


def test_ranks_started_by_srun_meet(start: Starter) -> None:
    shared = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start(2, sum_of_ranks, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **shared) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert [rank.log(i) != "" for i, rank in enumerate(ranks)] == [True, True]
    assert ranks[0].output == "the sum is 1, on 1 thread\n"
    assert ranks[1].output == ""


def test_a_world_that_does_not_fit_the_layout_is_the_users_to_mend(start: Starter) -> None:
    launcher = start(4, sum_of_ranks, **TORCHRUN)
    assert launcher.wait() == 2
    assert "the layout needs 4 ranks but 8 were started" in launcher.errors


def test_torchrun_ends_with_the_message_of_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from test_launch import last_rank_raises, launch\n"
        "sys.exit(launch(last_rank_raises, world_size=2))\n",
        encoding="utf-8",
    )
    path = os.pathsep.join(sys.path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", free_port()]
    run = subprocess.run(
        [*torchrun, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 1
    assert "rank 1 failed: Traceback" in run.stderr
    assert "ArithmeticError: one too many" in run.stderr
    assert "rank 0 failed" not in run.stderr
    # Below its own traceback torchrun repeats the message that the rank has left for it.
    assert run.stderr.rstrip().splitlines()[-2].strip() == "ArithmeticError: one too many"
