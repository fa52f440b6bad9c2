"""Folders of copies on a host: made for their user alone, and removed with what lies around them."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatronish.core.files import private_folder

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
