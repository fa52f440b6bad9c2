"""Real ranks for tests: `run_ranks(4, function, *args)` runs a function in processes with real process groups.

The ranks are processes kept over the whole session: forked, when first needed, from a server that has torch loaded and
nothing computed. For each call they are given a fresh place to meet, and `function(place, *args)` does as it likes
there, process groups included. The function must be at the top of a module (it is pickled by name); all that it needs
goes in its arguments, for a worker sees neither the test's environment variables nor its working directory.
"""

import atexit
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatronish.launch.local import WARM, meet_on_loopback
from megatronish.launch.place import Place

PATIENCE_SECONDS = 240.0  # far more than any call takes: cores may be busy with other things
LEAVE = b""  # what a worker is sent, in the place of a call, when a call is over on all of them
CALLS_A_COLLECTION = 16  # a collection takes 4 ms, a call 100 and more
# What each process would import by itself: a run's main rank; ranks of the theorem; who reads a config, in tyro's first
# call; the commands, when they know what they do.
LATE = (
    "torch.utils.tensorboard",
    "matplotlib.backends.backend_agg",
    "tests.support.preloaded",
    "tyro.constructors._struct_spec_dataclass",
    "tyro._backends._tyro_backend",
    "typeguard",
    "megatronish.commands.pretrain",
    "megatronish.commands.chat",
    "megatronish.commands.evaluate",
    "megatronish.train.preflight",
    "torch.utils.serialization",
)
GRACE_SECONDS = 0.2  # after the first failure, for others to say that they failed earlier


class RankError(AssertionError):
    """A rank raised, died or hung. The message says which and where."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE_SECONDS
) -> list[Any]:
    """What `function(place, *args)` returned on each rank. RankError with the first failed rank's traceback."""
    return _POOL.run(world_size, function, args, timeout)


def wait_until(condition: Callable[[], bool], *, timeout: float = 10.0) -> bool:
    """Whether `condition` came true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return answer


def is_running(pid: int) -> bool:
    """Whether a process lives; one that is dead and waits to be reaped does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def warm_context() -> ForkServerContext:
    """Multiprocessing context whose server has torch loaded and has computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", *WARM, "megatronish.train.run", *LATE])
    return context


class _Worker(NamedTuple):
    """A process that waits for calls, and the file where it says what it is doing when asked by SIGUSR2."""

    process: BaseProcess
    pipe: Connection
    stack_file: Path


class _Pool:
    """Workers in order of rank: a call takes as many as it needs, and a failed call ends them all."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._calls = itertools.count()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        while len(self._workers) < world_size:
            self._start_worker()
        assert self._folder is not None
        workers = self._workers[:world_size]
        meeting = f"file://{self._folder.name}/meet_{next(self._calls)}" if world_size > 1 else None
        try:
            for rank, worker in enumerate(workers):
                place = Place(rank, world_size, rank, world_size, meeting)
                worker.pipe.send_bytes(pickle.dumps((function, place, args)))
            results = _collect(workers, timeout)
            for worker in workers:  # only now: the call is over on every rank, so that nobody waits for another
                worker.pipe.send_bytes(LEAVE)
            return results
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all worker processes of the session."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers.clear()

    def _start_worker(self) -> None:
        context = warm_context()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
            atexit.register(self.stop)
        pipe, theirs = context.Pipe()
        stack_file = Path(self._folder.name) / f"stack_{len(self._workers)}"
        process = context.Process(target=_serve, args=(theirs, stack_file))
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, pipe, stack_file))


_POOL = _Pool()


def _collect(workers: Sequence[_Worker], timeout: float) -> list[Any]:
    """Wait for every rank's result; RankError as soon as one has failed."""
    results: list[Any] = [None] * len(workers)
    failures: dict[int, tuple[float, str]] = {}
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), left):
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            try:
                succeeded, seconds, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                workers[rank].process.join()
                succeeded, seconds, answer = False, -1.0, f"it died with exit code {workers[rank].process.exitcode}"
            if succeeded:
                results[rank] = answer
            else:
                failures[rank] = (seconds, answer)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        culprit = min(failures, key=lambda rank: failures[rank][0])
        raise RankError(f"rank {culprit} of {len(workers)} failed:\n{failures[culprit][1]}")
    if pending:
        raise RankError(_stacks(workers, sorted(pending.values()), timeout))
    return results


def _stacks(workers: Sequence[_Worker], ranks: Sequence[int], timeout: float) -> str:
    """Stack traces of `ranks`, each written by its own process."""
    for rank in ranks:
        os.kill(workers[rank].process.pid or 0, signal.SIGUSR2)
    time.sleep(0.3)
    stacks = [f"rank {rank}: {workers[rank].stack_file.read_text().strip()}" for rank in ranks]
    running = ", ".join(map(str, ranks))
    return f"still running after {timeout:g} s: rank {running} of {len(workers)}\n" + "\n".join(stacks)


def _serve(pipe: Connection, stack_file: Path) -> None:
    """The life of a worker: call after call, until pytest is gone."""
    gc.freeze()  # a collection would look through all modules, and write into the pages that they share
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_pytest, daemon=True).start()
    meet_on_loopback()
    torch.set_num_threads(1)
    num_calls = 0
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False)
        while True:
            call = pipe.recv_bytes()
            if call == LEAVE:
                num_calls += 1
                _leave(collect=num_calls % CALLS_A_COLLECTION == 0)
                continue
            torch.manual_seed(0)
            pipe.send_bytes(_answer(call))


def _leave(*, collect: bool) -> None:
    """Leave the process groups of the last call: while they exist, threads of each wake up 100 times a second.

    torch keeps the meshes of DTensors, and so their groups, in a cache of how operations are cut and in cycles.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if collect:
        if "torch.distributed.tensor" in sys.modules:
            importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        gc.collect()


def _answer(call: bytes) -> bytes:
    """(True, time, result) or (False, time, traceback), pickled by value: shared memory would end with this process."""
    try:
        function, place, args = pickle.loads(call)
        return pickle.dumps((True, time.monotonic(), function(place, *args)))
    except BaseException:
        return pickle.dumps((False, time.monotonic(), traceback.format_exc()))


def _die_with_pytest() -> None:
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os._exit(1)
