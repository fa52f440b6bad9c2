"""How does a folder appear whole, or not at all?"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatronish.checkpoint.folder import sync_folder
from megatronish.errors import RunError, UserError

NO_CONTENT = "lost+found"  # what an empty disk has


@contextmanager
def new_folder(path: Path, *, decisive: str) -> Iterator[Path]:
    """A folder to write into, whose content is in `path` once all is synced. `path` must be free or an empty folder.

    A folder that exists may be the root of a disk, which cannot be replaced: what was written beside it then moves in,
    the file `decisive` last, without which nobody takes the rest for whole. RunError if the disk is full or fails.
    Nothing of it stays then.
    """
    path = path.resolve()
    try:
        exists = _is_empty_folder(path)
        partial = path / ".partial" if exists else path.with_name(f".{path.name}.partial")
    except OSError as error:
        raise _failed(path, error) from error
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        sync_files(partial)
        if exists:
            _move_in(partial, path, decisive=decisive)
        else:
            partial.rename(path)
            sync_folder(path.parent)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_empty_folder(path: Path) -> bool:
    """Or nothing at all. UserError if it is neither."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise UserError(f"{path} exists already and is no folder; name a folder that does not exist")
    found = sorted(entry.name for entry in path.iterdir())
    if content := [name for name in found if not name.startswith(".") and name != NO_CONTENT]:
        raise UserError(f"{path} holds {content[0]} already, and nothing is overwritten; name an empty folder")
    return True


def _move_in(partial: Path, path: Path, *, decisive: str) -> None:
    """Move what is in `partial` into `path`, or nothing of it."""
    names = sorted((entry.name for entry in partial.iterdir()), key=lambda name: name == decisive)
    try:
        for name in names:
            if name == decisive:
                sync_folder(path)
            (partial / name).rename(path / name)
        sync_folder(path)
    except BaseException:
        for name in names:
            if not (partial / name).exists():
                (path / name).rename(partial / name)
        raise


def _failed(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} could not be written: {error.strerror or error}; nothing of it is left, make room or name another "
        "place"
    )


def sync_files(folder: Path) -> None:
    """Make all files in a folder, and their names, survive a power cut."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
