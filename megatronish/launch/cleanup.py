"""Folders in the temporary directory where ranks of one machine meet, and what killed launchers have left of them.

A launcher that ends removes its folder. One that is killed cannot: the next launcher of the same user does. A folder is
in use while its lock is held, which the system releases with the last process of the run.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatronish.core.errors import UserError

MEETING, RINGS = "megatronish-meet-", "megatronish-rings-"
LOCK = ".lock"
FEWEST_SECONDS, OF_THE_DEAD = 60.0, 1.0
"""Age from which a folder without a lock is a leftover: its maker is about to lock it before; and if that is not there.

A maker in another container is not seen from here, so that its folder has a second in any case.
"""


@contextmanager
def meeting_folder() -> Iterator[str]:
    """A new folder, removed at the end; leftovers of others are removed first. UserError if none can be made."""
    temporary = os.environ.get("TMPDIR", "/tmp")
    try:
        temporary = tempfile.gettempdir()
        remove_leftovers(Path(temporary))
        made = tempfile.TemporaryDirectory(prefix=f"{MEETING}{os.getpid()}-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(
            f"ranks meet in a folder of the temporary directory, and none can be made in {temporary}: "
            f"{error.strerror}; set TMPDIR to a folder that can be written"
        ) from error
    with made as folder, (Path(folder) / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def remove_leftovers(temporary: Path) -> None:
    """Remove what killed launchers of this user have left there; what cannot be removed stays."""
    with suppress(OSError):
        for folder in temporary.glob("megatronish-*"):
            with suppress(OSError):
                if folder.lstat().st_uid == os.getuid() and _is_left(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    if folder.name.startswith(RINGS):
        return not _is_alive(folder.name.removeprefix(RINGS))
    if not folder.name.startswith(MEETING):
        return False
    if not (folder / LOCK).exists():
        maker = folder.name.removeprefix(MEETING).partition("-")[0]
        return time.time() - folder.stat().st_mtime > (FEWEST_SECONDS if _is_alive(maker) else OF_THE_DEAD)
    with (folder / LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_alive(process: str) -> bool:
    """Whether the process that a folder is named by lives; of another name it may."""
    if not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
