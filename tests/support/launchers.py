"""Launchers in processes of their own, forked from the warm server of ranks.py, and what their ranks do in tests."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import warm_context

from megatronish.core.errors import UserError
from megatronish.launch import local
from megatronish.launch.local import launch, run_local_ranks
from megatronish.launch.place import Place

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
    return _killed(place, signal.SIGKILL)


def rank_one_gets_a_signal_without_a_name(place: Place) -> int:
    """A real-time signal."""
    return _killed(place, 50)


def _killed(place: Place, signum: int) -> int:
    join(place)
    if place.rank == 1:
        os.kill(os.getpid(), signum)
    dist.barrier()
    return 0


def rank_one_meets_a_bus_error(place: Place) -> int:
    join(place)
    if place.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGBUS)
    dist.barrier()
    return 0


def rank_zero_is_stopped_at_its_end(place: Place) -> int:
    join(place)
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
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


def looks_often() -> None:
    """Planted in a launcher: it looks at its ranks every tenth of a second."""
    local.LOOK_SECONDS = 0.1


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
        self,
        world_size: int,
        function: Callable[[Place], int],
        *,
        start_method: str = "",
        plant: Callable[[], None] | None = None,
        **environ: str,
    ) -> Launcher:
        folder = self._folder / str(len(self._launchers))
        folder.mkdir()
        process = warm_context().Process(
            target=_be_launcher, args=(folder, world_size, function, start_method, plant, environ)
        )
        process.start()
        self._launchers.append(Launcher(process, folder))
        return self._launchers[-1]

    def end(self) -> None:
        for launcher in self._launchers:
            launcher.process.kill()
            launcher.process.join()


def _be_launcher(
    folder: Path,
    world_size: int,
    function: Callable[[Place], int],
    start_method: Any,
    plant: Callable[[], None] | None,
    environ: dict[str, str],
) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if plant is not None:
        plant()
    if start_method:
        sys.exit(run_local_ranks(function, world_size=world_size, log_dir=folder / "logs", start_method=start_method))
    sys.exit(launch(function, world_size=world_size, log_dir=folder / "logs"))
