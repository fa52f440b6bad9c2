"""How does a folder appear whole, or not at all?"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatronish.checkpoint.folder import sync_folder
from megatronish.errors import RunError, UserError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that takes the name `path`, which must be free or an empty folder, once all is synced.

    RunError if the disk is full or fails. Nothing of it stays then.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path} exists already and nothing is overwritten; name a folder that does not exist")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_files(partial)
        partial.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}; nothing of it is left, make room or name another "
            "place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_files(folder: Path) -> None:
    """Make all files in a folder, and their names, survive a power cut."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
