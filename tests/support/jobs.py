"""Training jobs for tests: on ranks that exist already, or as whole processes with launcher and exit status.

`train_on_ranks` calls `train` in the workers of ranks.py: quick, for what a run computes and writes. `started` and
`run_job` are `pretrain_gpt.py` itself in a process group of its own, forked from a server that has all imported: for
exit status, messages, signals and kills. A `plant` (a function at the top of a module) is called in it first.
"""

import contextlib
import gc
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import run_ranks, wait_until, warm_context

from megatronish.commands.pretrain import main
from megatronish.config.read import read_config
from megatronish.data.indexed import IndexedWriter
from megatronish.formats.start import read_start
from megatronish.launch.place import Place
from megatronish.report.plot import read_lines
from megatronish.train import run
from megatronish.train.run import train

SECONDS = 60.0  # no job here takes a tenth of that on an idle machine
VOCABULARY = 101  # which every tp pads to another size

# Dropout, which must survive a resume too, is at its default of 0.1.
TINY = {
    "--num-layers": "2",
    "--hidden-size": "24",
    "--num-attention-heads": "12",
    "--ffn-hidden-size": "48",
    "--make-vocab-size-divisible-by": "1",
    "--seq-length": "16",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--train-iters": "6",
    "--lr": "1e-2",
    "--eval-iters": "0",
    "--vocab-size": str(VOCABULARY),
    "--device": "cpu",
}
MOCK = "--mock-data"

_numbers = itertools.count()


def tiny(run_dir: Path, flags: str = "", *, data: str = MOCK) -> list[str]:
    """The command line of a run that takes about a second; `flags` take the place of those in TINY."""
    others = [*data.split(), *flags.split()]
    base = [word for name, value in TINY.items() if name not in others for word in (name, value)]
    return [*base, "--run-dir", str(run_dir), *others]


def write_tokens(prefix: Path, *, vocab_size: int = VOCABULARY, seed: int = 0) -> Path:
    """A .bin/.idx pair of 60 short documents, each ended by the last id; returns the prefix."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, dtype=np.dtype("uint16")) as writer:
        for length in random.integers(5, 60, 60):
            writer.add_document([*random.integers(0, vocab_size - 1, length), vocab_size - 1])
    return prefix


class Seen(NamedTuple):
    """A step as metrics.jsonl has it."""

    loss: float
    grad_norm: float


def steps_of(run_dir: Path) -> dict[int, Seen]:
    """Every step of a run; of a step that was repeated, the last."""
    return {line["step"]: Seen(line["loss"], line["grad_norm"]) for line in read_lines(run_dir / "metrics.jsonl")}


def checkpoints_of(run_dir: Path) -> list[str]:
    """The names in a run's checkpoints folder, hidden ones too, but for that of its lock."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != ".lock")


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    """The state.json of a checkpoint."""
    return json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


def train_on_ranks(argv: Sequence[str], *, world_size: int = 1, draws: bool = False) -> str:
    """Run `train` on `world_size` ranks; what the main rank printed. Its curves are drawn where they are looked at."""
    return run_ranks(world_size, be_rank, list(argv), draws)[0]


def be_rank(place: Place, argv: list[str], draws: bool = False) -> str:
    """One rank of a run; what it printed."""
    with contextlib.nullcontext() if draws else _no_curves():
        return _be_rank(place, argv)


@contextlib.contextmanager
def _no_curves() -> Iterator[None]:
    """Meanwhile a run draws no curves, which would take a tenth of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "draw_curves", _leave_an_empty_file)
        yield


def _leave_an_empty_file(folder: Path) -> None:
    """In the place of curves: that they are there says that a run has had its ending."""
    with contextlib.suppress(OSError):  # as what cannot be drawn ends no run
        (folder / "loss.png").touch()


def _be_rank(place: Place, argv: list[str]) -> str:
    config, notes = read_config(argv, read_start=read_start)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = train(config, notes, place)
    assert status == 0
    return output.getvalue()


class Finished(NamedTuple):
    """How a job ended."""

    status: int
    output: str
    errors: str


def call_main(argv: Sequence[str], *, main: Callable[[list[str]], int] = main, **environ: str) -> Finished:
    """`pretrain_gpt.py ARGV` in a worker of ranks.py: quick, for what a single process finds wrong."""
    return run_ranks(1, _in_worker, list(argv), environ, main)[0]


def _in_worker(_place: Place, argv: list[str], environ: dict[str, str], main: Callable[[list[str]], int]) -> Finished:
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        with (
            _no_curves(),
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(io.StringIO()) as errors,
        ):
            status = main(argv)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Finished(status, output.getvalue(), errors.getvalue())


class Job(NamedTuple):
    """A pretrain_gpt.py under way; what it writes goes to files."""

    process: BaseProcess
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def told(self) -> str:
        """All output so far, for the message of an assertion."""
        return f"stdout:\n{self.output}\nstderr:\n{self.errors}"

    def signal(self, signum: int) -> None:
        """Send a signal to the launcher alone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def kill(self) -> None:
        """SIGKILL to launcher and ranks at once."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self, seconds: float = SECONDS) -> int:
        """The exit status; minus the signal's number if one ended it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {seconds:g} s\n{self.told}")
        return self.process.exitcode

    def is_gone(self) -> bool:
        """Whether the launcher and all its ranks have ended, within a few seconds."""
        return wait_until(lambda: f" {self.process.pid} " not in _living_groups())


@contextlib.contextmanager
def started(
    argv: Sequence[str],
    folder: Path,
    *,
    main: Callable[[list[str]], int] = main,
    plant: Callable[..., None] | None = None,
    plant_args: Sequence[Any] = (),
    draws: bool = False,
) -> Iterator[Job]:
    """`main(ARGV)` while it runs, killed at the end; its output goes into a new folder in `folder`.

    Its curves are drawn where they are looked at.
    """
    context = warm_context()
    own = folder / f"job_{next(_numbers)}"
    own.mkdir(parents=True)
    process = context.Process(target=_be_job, args=(own, list(argv), main, plant, plant_args, draws))
    process.start()
    job = Job(process, own)
    try:
        yield job
    finally:
        job.kill()
        process.join()


def run_job(argv: Sequence[str], folder: Path, *, seconds: float = SECONDS, **options: Any) -> Finished:
    """`main(ARGV)` from start to end, in so many seconds at most; for `options` see `started`."""
    with started(argv, folder, **options) as job:
        status = job.wait(seconds)
        assert job.is_gone()
        return Finished(status, job.output, job.errors)


def _living_groups() -> str:
    """The process groups of all processes that live, or whose threads still do, holding its files open."""
    lines = subprocess.run(["ps", "-A", "-o", "stat=,pgid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in lines.splitlines()]
    return " ".join(["", *(group for state, group in pairs if not state.startswith("Z") or "l" in state), ""])


def _be_job(
    folder: Path,
    argv: list[str],
    main: Callable[[list[str]], int],
    plant: Callable[..., None] | None,
    plant_args: Sequence[Any],
    draws: bool,
) -> None:
    gc.freeze()
    if not draws:
        run.draw_curves = _leave_an_empty_file  # this process is the job's alone
    os.setsid()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if plant is not None:
        plant(*plant_args)
    sys.exit(main(argv))
