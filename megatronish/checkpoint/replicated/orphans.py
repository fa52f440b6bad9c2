"""Folders of copies that no run needs any more, as of a run that was killed and then removed.

A folder says which run it is of, and a rank locks it while the run lives. An orphan is one that is not locked, and
whose run is not there: its folder of checkpoints has another name for copies, or none. That run may have been removed,
but may also have been moved, or lie on a disk that is not mounted now. So its copies stay for a day, unless the room is
needed. Where the folder of checkpoints cannot be seen, as on a store or in another container, they stay for a week.
"""

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatronish.checkpoint.remote import Location
from megatronish.checkpoint.replicated.folders import NAME, read_id

OWNER = "owner"
DAY = 86400.0
"""Seconds after which a folder is an orphan whose run is not where it was."""
LONG = 7 * DAY
"""Seconds after which a folder is an orphan whose run cannot be asked for."""


def own(folder: Path, save_place: Location) -> BinaryIO:
    """Say in a folder of copies whose it is, and lock it until the file that is returned is closed."""
    place = os.path.realpath(save_place) if isinstance(save_place, Path) else str(save_place)
    path = folder / OWNER
    path.write_text(json.dumps({"host": os.uname().nodename, "save": place}))
    file = path.open("rb")
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(file, fcntl.LOCK_SH)  # who looks whether it is an orphan has it for a moment
    return file


def remove_orphans(parent: Path, *, but: str, moved_for: float = DAY) -> list[Path]:
    """Remove folders of copies in `parent` that no run needs; what cannot be removed stays. `but` is the own one.

    A run that is not where it was may have moved: its folder stays for `moved_for` seconds after the last change.
    Returns the folders that were removed.
    """
    removed = orphans_in(parent, but=but, moved_for=moved_for)
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder for folder in removed if not folder.exists()]


def orphans_in(parent: Path, *, but: str, moved_for: float = DAY) -> list[Path]:
    """The folders that `remove_orphans` removes."""
    found = []
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            if folder.name != but and NAME.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                with suppress(OSError):
                    if _is_orphan(folder, moved_for):
                        found.append(folder)
    return found


def _is_orphan(folder: Path, moved_for: float) -> bool:
    owner, limit = folder / OWNER, LONG
    if owner.is_file():
        with owner.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            text = file.read()
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            said = json.loads(text)
            save = Path(str(said["save"]))
            if read_id(save)[0] == folder.name:
                return False
            if save.is_absolute() and save.is_dir() and said["host"] == os.uname().nodename:
                limit = moved_for
    changed = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return time.time() - max(changed) >= limit
