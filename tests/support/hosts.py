"""Hosts for tests: ranks of one machine in groups, each with a local folder of its own."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jobs import be_rank
from planted_kills import kill_after, kill_all_in_step
from ranks import run_ranks

from megatronish.checkpoint.replicated.copies import NearbyCopies
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Axis


def on_hosts(folder: Path, per_host: int) -> None:
    """Planted in a job: every `per_host` ranks are a host, whose local folder is FOLDER/host_0, FOLDER/host_1, ..."""
    open_folders = NearbyCopies.open.__func__  # type: ignore[attr-defined]

    def open_own(cls: type[NearbyCopies], _local_save: str | None, *, axis: Axis, **options: Any) -> NearbyCopies:
        return open_folders(cls, str(folder / f"host_{axis.rank // per_host}"), axis=axis, **options)

    NearbyCopies.open = classmethod(open_own)  # type: ignore[method-assign, assignment]


def killed_in_step(folder: Path, per_host: int, step: int) -> None:
    """Planted in a job: such hosts, and SIGKILL to all of them in the middle of a step."""
    on_hosts(folder, per_host)
    kill_all_in_step(step)


def killed_after(folder: Path, per_host: int, seconds: float) -> None:
    """Planted in a job: such hosts, and SIGKILL to all of them so long after the first step."""
    on_hosts(folder, per_host)
    kill_after(seconds, None)


def killed_at(folder: Path, per_host: int, event: str, text: str) -> None:
    """Planted in a job: such hosts, and SIGKILL to all when a rank first meets `event` on a path with `text` in it."""
    on_hosts(folder, per_host)

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and any(text in str(argument) for argument in arguments):
            os.killpg(0, signal.SIGKILL)

    sys.addaudithook(audit)


def without_room(folder: Path, per_host: int, step: int) -> None:
    """Planted in a job: such hosts, and a neighbour that has no room for the first copy from `step` on."""
    on_hosts(folder, per_host)
    left = [1]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        found = re.search(r"host_1/\w+/\.step_(\d+)\.partial/__0_0", str(arguments[0])) if name == "open" else None
        if found and int(found[1]) >= step and left[0]:
            left[0] = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(audit)


def without_room_for_fetched(folder: Path, per_host: int, host: int) -> None:
    """Planted in a job: such hosts, of which one has no room for shards that it fetches from others."""
    on_hosts(folder, per_host)

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        is_new = name == "open" and bool(arguments[2] & os.O_CREAT)
        if is_new and re.search(rf"host_{host}/\w+/step_\d+/__", str(arguments[0])):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(audit)


class Said(NamedTuple):
    """What the main rank printed."""

    output: str
    errors: str


def train_on_hosts(argv: list[str], folder: Path, *, world_size: int, per_host: int) -> Said:
    """Run `train` on ranks of such hosts; what the main rank printed."""
    return run_ranks(world_size, _be_rank, argv, folder, per_host)[0]


def _be_rank(place: Place, argv: list[str], folder: Path, per_host: int) -> Said:
    own = ["--local-save", str(folder / f"host_{place.rank // per_host}")]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        output = be_rank(place, [*argv, *own])
    return Said(output, errors.getvalue())
