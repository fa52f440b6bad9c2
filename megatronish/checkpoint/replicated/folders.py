"""Folders of copies on a host: made for their user alone, within its memory, and removed once no run needs them.

A folder says which run it is of, and a rank locks it while the run lives. An orphan is one that is not locked, and
whose run is not there: its folder of checkpoints has another name for copies, or none. That run may have been removed,
but may also have been moved, or lie on a disk that is not mounted now. So its copies stay for a day, unless the room is
needed. Where the folder of checkpoints cannot be seen, as on a store or in another container, they stay for a week.

What is written to /dev/shm counts towards the limit of the container that writes it. A container may have a limit far
below the size of its /dev/shm, and beyond it the system ends a process instead of refusing a write.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatronish.core.files import write_durably
from megatronish.core.private import private_folder
from megatronish.core.remote import Location, RemotePath

# Identity of a run's copies: 32 hexadecimal digits in a file among its checkpoints, and the place of that file.
#
# A run whose checkpoints are removed has none, nor has a folder that was copied: the file says where it was written,
# and if a folder with the same digits is there still, this one is its copy. If none is there, it was moved. Numbers and
# times of files say nothing: network file systems and overlays change them, and hard links share them.
ID = ".copies"
"""File among a run's checkpoints, of which its folders of copies have their name."""
NAME = re.compile("[0-9a-f]{32}")


def id_of(save_place: Location) -> str:
    """Name of the run's folders of copies, 32 hexadecimal digits; another one for a new run."""
    if isinstance(save_place, RemotePath):
        path = save_place / ID
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return hashlib.sha256(path.read_bytes() + str(path).encode()).hexdigest()[:32]
    here = os.path.realpath(save_place)
    name, place = read_id(save_place)
    if name is None or (place != here and _is_copy(save_place, name, Path(place))):
        name, place = uuid.uuid4().hex, ""
    if place != here:
        write_durably(save_place / ID, json.dumps({"name": name, "place": here}) + "\n")
    return name


def read_id(save_place: Path) -> tuple[str | None, str]:
    """The digits in a folder of checkpoints, None without them, and the place at which they were written."""
    try:
        said = json.loads((save_place / ID).read_text())
        name, place = said["name"], said["place"]
        return (name if NAME.fullmatch(name) else None), place
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # it is not there, or none of ours
        return None, ""


def _is_copy(folder: Path, name: str, place: Path) -> bool:
    """Whether another folder at `place` has the same name: not this one, to which a second mount may lead."""
    if not place.is_absolute() or read_id(place)[0] != name:
        return False
    probe = f"{ID}.{uuid.uuid4().hex}"
    (folder / probe).touch()
    try:
        return not os.path.lexists(place / probe)
    finally:
        (folder / probe).unlink()


PRIVATE = 0o700


def folder_of_user() -> str:
    """Name of the folder around those of all runs of this user."""
    return f"megatronish-{os.getuid()}"


def make_folder(folder: Path) -> Path:
    """The folder, made if it is missing; OSError if it cannot be, is a link, or lies in a folder of another user."""
    parent = folder.parent
    if parent.name == folder_of_user():
        private_folder(parent)
    else:
        parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    if folder.is_symlink():
        raise PermissionError(errno.EPERM, "it is a link", str(folder))
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a host's folder of a run, and that around it if it is empty now and not one that the user has named."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name == folder_of_user():
        with suppress(OSError):
            folder.parent.rmdir()


OWNER = "owner"
DAY = 86400.0
"""Seconds after which a folder is an orphan whose run is not where it was."""
LONG = 7 * DAY
"""Seconds after which a folder is an orphan whose run cannot be asked for."""


def claim_folder(folder: Path, save_place: Location) -> BinaryIO:
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
    orphans = []
    with suppress(OSError):
        for folder in list(parent.iterdir()):
            if folder.name != but and NAME.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                with suppress(OSError):
                    if _is_orphan(folder, moved_for):
                        orphans.append(folder)
    return orphans


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
