"""Atomic writers of files and folders: whole under their name or not there at all, also after a power cut.

Each writes next to the final name, flushes to the disk and renames: a small text (`write_durably`), a file of any size
(`AtomicFile`), a folder (`new_folder`). Checkpoints, which many ranks write, are renamed by checkpoint/folder.py.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from megatronish.errors import RunError, UserError

NO_CONTENT = "lost+found"  # a folder that is in the root of an empty ext4 disk


def write_durably(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one, whenever the machine stops."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """fsync of a folder: the names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicFile:
    """Temporary file that becomes `path` in `commit`. As a context: committed at the end, discarded after an exception.

    A crash leaves at most `<name>.<random>.tmp` next to it, which nothing ever reads.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        self.file = self._temporary.open("xb")

    def commit(self, *, keep_existing: bool = False) -> None:
        """Rename the file to `path`; a file of that name is replaced, or with `keep_existing` it stays.

        Files that other nodes may have mapped need `keep_existing`: over NFS, replacing a file breaks its mappings.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        try:
            if keep_existing:
                os.link(self._temporary, self.path)
            else:
                os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        except FileExistsError:
            pass
        finally:
            self._temporary.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the temporary file; a committed file stays."""
        with suppress(OSError):  # a full disk refuses what is still buffered, too
            self.file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()


@contextmanager
def new_folder(path: Path, *, decisive: str) -> Iterator[Path]:
    """Temporary folder to write into, which becomes `path` when all of its files are synced.

    `path` must be free or an empty folder. A folder that exists may be the root of a disk, which cannot be replaced:
    the files are then written into a hidden folder in it and moved up one by one, the file `decisive` last, because
    readers take a folder without that file for incomplete. UserError if `path` is not empty, RunError if the disk is
    full or fails; nothing that was written stays then.
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
    """Whether `path` is an empty folder; False if nothing is there. UserError for a file or a folder with content."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise UserError(f"{path} exists already and is no folder; name a folder that does not exist")
    names = sorted(entry.name for entry in path.iterdir())
    if content := [name for name in names if not name.startswith(".") and name != NO_CONTENT]:
        raise UserError(f"{path} holds {content[0]} already, and nothing is overwritten; name an empty folder")
    return True


def _move_in(partial: Path, path: Path, *, decisive: str) -> None:
    """Move the entries of `partial` into `path`, the file `decisive` last; after an error, all are moved back."""
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
        f"{path} could not be written: {error.strerror or error}; no partial file is left; free space or name another "
        "place"
    )


def sync_files(folder: Path) -> None:
    """fsync of all files and folders in a folder, from the deepest up: contents and names survive a power cut."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
