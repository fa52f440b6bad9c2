"""Scripts of the checkout in tests, in a process forked from one that has all imported.

As `python SCRIPT ARGV`, but without the seconds in which it imports torch: for what a script does, prints and returns.
How it starts where nothing is imported is for `subprocess`, as are scripts that a signal ends while processes of their
own start: those would print tracebacks here.
"""

import contextlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jobs import Finished, Job, started
from paths import ROOT

SECONDS = 300.0  # for a script that computes more than a job of jobs.py


@contextlib.contextmanager
def started_script(
    words: Sequence[object], folder: Path, *, at: Path = ROOT, pipe: Path | None = None, draws: bool = False
) -> Iterator[Job]:
    """`python WORDS` in the folder `at` while it runs; its output goes into a new folder in `folder`.

    A named `pipe` is its standard input. Its curves are drawn where they are looked at.
    """
    script, *argv = map(str, words)
    main = partial(run_file, str(at / script))
    with started(argv, folder, main=main, plant=enter, plant_args=(at, pipe), draws=draws) as job:
        yield job


def run_script(words: Sequence[object], folder: Path, *, text: str | None = None, **options: Any) -> Finished:
    """`python WORDS` from start to end, with `text` through a pipe; for `options` see `started_script`."""
    pipe = None
    if text is not None:
        pipe = folder / "stdin"
        os.mkfifo(pipe)
    with started_script(words, folder, pipe=pipe, **options) as job:
        if pipe is not None:
            with open_pipe(pipe, job) as written:
                written.write(text or "")
            pipe.unlink()
        status = job.wait(SECONDS)
        assert job.is_gone()
        return Finished(status, job.output, job.errors)


def open_pipe(pipe: Path, job: Job) -> TextIO:
    """A named pipe that the job reads, once it has opened it; an assertion if the job ends before."""
    while True:
        with contextlib.suppress(OSError):  # nobody reads it yet
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "w", encoding="utf-8")
        assert job.process.is_alive(), job.told
        time.sleep(0.01)


def run_code(code: str, folder: Path, **options: Any) -> Finished:
    """`python -c CODE` in `folder`, which keeps it in a file; for `options` see `started_script`."""
    (folder / "code.py").write_text(code)
    return run_script(["code.py"], folder, at=folder, **options)


def run_file(path: str, argv: list[str]) -> int:
    """A file of Python as the program of this process."""
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
    return 0


def enter(folder: Path, pipe: Path | None) -> None:
    """Of the process: where it runs, and what it reads."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who starts the tests in the background has it ignored
    os.environ["COLUMNS"] = "200"
    os.chdir(folder)
    os.dup2(os.open(pipe or os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has closed it
