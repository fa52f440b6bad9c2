"""Work on batches of lines, in this process or by many workers, whose results come in the order of the batches.

A worker is sent the job, and prepares by itself what the job needs, such as a tokenizer: what a process is sent when it
starts must fit into a pipe that no process reads yet. A larger message would block the parent for ever if the worker
dies before.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from megatronish.config.plugins import naming_plugins
from megatronish.core.errors import RunError
from megatronish.data.readers import Batch

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}  # for Hugging Face's library, which else takes every core

Result = TypeVar("Result")
ResultOf = TypeVar("ResultOf", covariant=True)


class BatchJob(Protocol[ResultOf]):
    """What is done with each batch, as it is sent to workers."""

    def prepared(self) -> Callable[[Batch], ResultOf]:
        """The work of this process, with all that it needs."""


class WorkerDiedError(RunError):
    """A worker process ended in the middle of its work."""


def in_order(
    batches: Iterator[Batch], job: BatchJob[Result], own_work: Callable[[Batch], Result], *, workers: int
) -> Generator[Result]:
    """What a job makes of each batch, in their order; `own_work` is the job as it was prepared in this process."""
    if workers == 1:
        with _environment(ONE_THREAD):
            yield from map(own_work, batches)
        return
    # spawn: safe whatever threads the parent has, and the same on Linux and macOS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        under_way: deque[Future[Result]] = deque()
        is_done = False
        try:
            for batch in batches:
                # It may start a worker: one of the two prints a traceback if that is interrupted.
                with signals_held(), _ctrl_c_blocked():
                    under_way.append(pool.submit(_work_in_worker, batch))
                if len(under_way) >= 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
            is_done = True
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a tokenizing worker died (killed, or out of memory); nothing was written; "
                "start again, with fewer --workers if memory is short"
            ) from error
        finally:
            # Idle workers are waited for: where this process ends at once, their last message could be lost on the way.
            pool.shutdown(wait=is_done, cancel_futures=True)


@contextmanager
def _environment(defaults: dict[str, str]) -> Iterator[None]:
    """Environment variables for a time, where the user has not set them."""
    own = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end the program wait. Masking them is not enough: another thread of this process may take them."""
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    held = [signum for signum in ENDING if in_main and callable(signal.getsignal(signum))]
    before = {signum: signal.signal(signum, lambda number, _frame: received.append(number)) for signum in held}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Ctrl-C does not reach processes that are started now: they are in the group of the terminal, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker(NamedTuple):
    """What a worker process does with each batch, or why it cannot."""

    work: Callable[[Batch], Any] | None
    failure: str


_worker: Worker | None = None
"""State of this worker process: made once at its start instead of with every batch."""


def _start_worker(job: BatchJob[Any]) -> None:
    global _worker
    # Ctrl-C is the parent's to answer: it has been blocked since this process was started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ |= {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    try:
        _worker = Worker(job.prepared(), "")
    except Exception as error:  # the parent has prepared the same job, and reports why a worker cannot
        _worker = Worker(None, f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work_in_worker(batch: Batch) -> Any:
    assert _worker is not None
    if _worker.work is None:
        raise RunError(f"a worker cannot build the tokenizer ({_worker.failure}); nothing was written; start again")
    with naming_plugins():
        return _worker.work(batch)
