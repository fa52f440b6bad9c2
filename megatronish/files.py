"""Files and folders that appear under their name whole or not at all, and survive a power cut.

Each is written beside its name, flushed to the disk and renamed: a small text (`write_durably`), a file of any size
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

NO_CONTENT = "lost+found"  # what an empty disk has


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, whenever the machine stops."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicFile:
    """Bytes on their way to `path`. As a context it is committed at the end, or discarded after an exception.

    A crash leaves at most `<name>.<random>.tmp` beside it, which nothing ever reads.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        self.file = self._temporary.open("xb")

    def commit(self, *, keep_existing: bool = False) -> None:
        """Give the bytes their name, in place of what bore it, or not if `keep_existing` and something bears it.

        Files that other nodes may have mapped need `keep_existing`: over NFS, replacing one pulls it from under them.
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
        """Leave nothing behind, unless it is committed."""
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
