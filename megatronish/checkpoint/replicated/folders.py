"""Folders of copies on a host: made for their user alone, and removed with what lies around them."""

import hashlib
import json
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from megatronish.checkpoint.remote import Location, RemotePath
from megatronish.core.files import private_folder, write_durably

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
    """The folder, made if it is missing; OSError if it cannot be, or if another user has made what lies around it."""
    parent = folder.parent
    if parent.name == folder_of_user():
        private_folder(parent)
    else:
        parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a host's folder of a run, and that around it if it is empty now and not one that the user has named."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name == folder_of_user():
        with suppress(OSError):
            folder.parent.rmdir()
