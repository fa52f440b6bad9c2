"""Atomic writers of files and folders: whole under their name or not there at all, also after a power cut.

Each writes next to the final name, flushes to the disk and renames: a small text (`write_durably`), a file of any size
(`AtomicFile`), a folder (`new_folder`). Checkpoints, which many ranks write, are renamed by checkpoint/folder.py. With
`one_builder`, processes that want the same file leave its building to one of them.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, TextIO

from megatronish.core.errors import RunError, UserError, is_misplaced, without_passwords
from megatronish.core.private import NO_LINK, opened_lock

NO_CONTENT = "lost+found"  # a folder that is in the root of an empty ext4 disk


def write_durably(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one, whenever the machine stops."""
    aside = path.with_name(path.name + ".new")
    with naming(path), _removed_after_an_error(aside):
        with _opened(aside) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    sync_folder(path.parent)


def write_quickly(path: Path, text: str) -> None:
    """Replace a file atomically, without waiting for the disk: after a power cut it may be the old one, or empty."""
    aside = path.with_suffix(".new")
    with naming(path), _removed_after_an_error(aside):
        with _opened(aside) as file:
            file.write(text)
        aside.replace(path)


def _opened(aside: Path) -> TextIO:
    """Open for writing, never through a link: whoever can write into the folder can guess the name."""
    if aside.is_symlink():
        aside.unlink()
    return os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_LINK, 0o666), "w")


TEMPORARY = re.compile(r"\.[0-9a-f]{12}\.tmp")
"""What the name of a temporary file has behind that of its file."""
OF_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of errors that no read has."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which an error of the system names the path: that of a write has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def remedy_of_writing(error: OSError, place: Path | None = None) -> str:
    """What to do before another start, where a file in the place could not be written."""
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f unlimited)"
    if error.errno == errno.EDQUOT:
        return "free space there or ask for a larger quota"
    if error.errno == errno.ENOSPC and place is not None:
        with suppress(OSError):
            file_system = os.statvfs(place)
            if file_system.f_files and not file_system.f_favail:
                return "remove files there, because its file system can have no more of them (df -i)"
    return "free space there"


@contextmanager
def _removed_after_an_error(aside: Path) -> Iterator[None]:
    """Context in which a file is written, of which nothing stays where the disk is full."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def ordinary(path: Path) -> Path:
    """The path, if reading it comes to an end; OSError for a device, or for a pipe that no shell has put there.

    A shell's `<(command)` and standard input are pipes in /dev, with a writer at the other end.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (stat.S_ISFIFO(mode) and path.is_relative_to("/dev"))):
        raise OSError(errno.EINVAL, "it is no file but a pipe or a device", str(path))
    return path


def refuse_unwritable_file(path: Path, *, flag: str) -> None:
    """Make the folder of a file that is written later; UserError now if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_fifo() or path.is_char_device():
            return
        is_new = not path.exists()
        with path.open("ab"):  # not os.access: network file systems and those of the kernel refuse what its modes allow
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}; choose another") from error


def sync_folder(folder: Path) -> None:
    """fsync of a folder: the names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicFile:
    """Temporary file that becomes `path` in `commit`. As a context: committed at the end, discarded after an exception.

    A process that is killed leaves `<name>.<random>.tmp` next to it, which nothing ever reads. The next writer of the
    same path removes it: the temporary file is locked while its writer lives, and the system releases the lock.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        self.path = path
        self._temporary, self.file = _locked_file_beside(path)

    def commit(self, *, keep_existing: bool = False, durably: bool = True) -> None:
        """Rename the file to `path`; a file of that name is replaced, or with `keep_existing` it stays.

        Without `durably` the disk is not waited for: after a power cut the file may hold anything.

        Files that other nodes may have mapped need `keep_existing`: over NFS, replacing a file breaks its mappings.
        """
        try:
            with naming(self.path):
                self.file.flush()
                if durably:
                    os.fsync(self.file.fileno())
                if keep_existing:
                    os.link(self._temporary, self.path)
                else:
                    os.replace(self._temporary, self.path)
                if durably:
                    sync_folder(self.path.parent)
        except FileExistsError:
            pass
        finally:
            self._temporary.unlink(missing_ok=True)
            self.file.close()  # last: it releases the lock

    def discard(self) -> None:
        """Delete the temporary file; a committed file stays."""
        self._temporary.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk refuses what is still buffered, too
            self.file.close()

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A write into the file, of a full disk, names none.
            if isinstance(error, OSError) and error.filename is None and error.errno in OF_WRITING:
                error.filename = str(self.path)
            if kind is None:
                self.commit()
        finally:
            self.discard()


@contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """A new folder `<name>.<random>.tmp` next to `path`, for one process; it is removed at the end.

    Those of dead processes are removed first: a folder is locked while its process lives, as an `AtomicFile` is.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftover_folders(path.parent, path.name)
        while True:
            folder = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
            folder.mkdir()
            try:
                lock = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:  # another process has taken the folder for a leftover
                continue
            if _lock(lock) != "taken" and folder.exists():
                break
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftover_folders(place: Path, name: str | None = None) -> None:
    """Delete the working folders in `place`, those of `name` or all, whose processes are dead.

    One that cannot be locked is left alone.
    """
    pattern = re.compile((".+" if name is None else re.escape(name)) + r"\.[0-9a-f]{12}\.tmp")
    for leftover in [entry for entry in place.iterdir() if pattern.fullmatch(entry.name)]:
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | NO_LINK)
            try:
                if _lock(descriptor) == "locked":
                    shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked_file_beside(path: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file for `path`, locked by this process where the file system has locks."""
    while True:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        file = temporary.open("xb")
        # Between the two, another process may have taken the file for a leftover.
        if _lock(file) != "taken" and temporary.exists():
            return temporary, file
        file.close()


def _remove_leftovers(path: Path) -> None:
    """Delete the temporary files of `path` that no living process writes. One that cannot be locked is left alone."""
    # Names alone, and the cheap question first: a cache of a thousand files is looked through for each of them.
    start = f"{path.name}."
    own = [name for name in os.listdir(path.parent) if name.startswith(start)]
    for name in [name for name in own if TEMPORARY.fullmatch(name, len(path.name))]:
        leftover = path.parent / name
        with suppress(OSError), leftover.open("r+b") as file:
            if _lock(file) == "locked":
                leftover.unlink()


@contextmanager
def one_builder(path: Path, *, patience_seconds: float = 600.0) -> Iterator[None]:
    """Let one process at a time build `path`, over all machines that share its folder, as far as that has locks.

    The first process enters at once; those that come while it builds enter when it has left or has died, all of them
    together: each looks whether the file is there now. No process waits longer than `patience_seconds`, or where no
    lock can be made, in a read-only folder for example.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = opened_lock(lock)
    except OSError:
        yield
        return
    with file:
        state, deadline = _lock(file), time.monotonic() + patience_seconds
        if state != "taken":
            try:
                yield
            finally:
                with suppress(OSError):
                    lock.unlink(missing_ok=True)
            return
        while state == "taken" and time.monotonic() < deadline:
            time.sleep(0.02)
            state = _lock(file)
    yield


def _lock(file: BinaryIO | int) -> Literal["locked", "taken", "impossible"]:
    """Lock a file for this process, without waiting. Some network file systems have no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError:
        return "impossible"
    return "locked"


@contextmanager
def new_folder(path: Path, *, decisive: str) -> Iterator[Path]:
    """Temporary folder to write into, which becomes `path` when all of its files are synced.

    `path` must be free or an empty folder. A folder that exists may be the root of a disk, which cannot be replaced:
    the files are then written into a hidden folder in it and moved up one by one, the file `decisive` last, because
    readers take a folder without that file for incomplete. UserError if `path` is not empty, RunError if the disk is
    full or fails; nothing that was written stays then. An error of a file that is read meanwhile stays as it is.
    """
    path = Path(os.path.realpath(path))
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
        if _is_elsewhere(error, path, partial):
            raise
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


def _is_elsewhere(error: OSError, *folders: Path) -> bool:
    """Whether an error is one of a file that is in none of the folders, and none above them."""
    if error.errno in OF_WRITING:  # a copy names the file that it reads first
        return False
    if not isinstance(error.filename, str | os.PathLike):
        return False
    file = Path(os.path.realpath(error.filename))
    return not any(file.is_relative_to(folder) or folder.is_relative_to(file) for folder in folders)


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both names are of one file that is there."""
    with suppress(OSError, ValueError):
        return one.samefile(other)
    return False


def refuse_url(flag: str, output: Path) -> None:
    """UserError for a URL, which as a path is a folder named `s3:` of this disk."""
    if re.fullmatch(r"[A-Za-z][\w+.-]+:", output.parts[0] if output.parts else ""):
        url = without_passwords(str(output).replace(":/", "://", 1))
        raise UserError(f"{flag} {url} is a URL, and this is written to a disk alone; name a path")


def refuse_input_as_output(flag: str, output: Path | None, inputs: Iterable[object]) -> None:
    """UserError if what is to be written is one of the files, or in one of the folders, that are read; or is a URL.

    They may be paths in text; None is none. What is not there yet may be written into such a folder.
    """
    if output is None:
        return
    refuse_url(flag, output)
    for path in (Path(str(each)) for each in inputs if each is not None):
        if is_same_file(path, output) or (_is_folder(path) and output.is_file() and _is_in(output, path)):
            raise UserError(f"{flag} {output} is a file that is read; choose another")


def _is_folder(path: Path) -> bool:
    with suppress(OSError, ValueError):
        return path.is_dir()
    return False


def _is_in(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def unwritten(name: str, path: Path, error: OSError) -> RunError | UserError:
    """What to raise for a file, `name` in the sentence, that could not be written: status 1 where a disk is full."""
    reason = error.strerror or error
    if is_misplaced(error):
        return UserError(f"{name} cannot be written: {reason}; choose another")
    return RunError(f"{name} cannot be written: {reason}; {remedy_of_writing(error, path.parent)}, or choose another")


def _failed(path: Path, error: OSError) -> RunError | UserError:
    if is_misplaced(error):
        return UserError(f"{path} cannot be written: {error.strerror}; no partial file is left; name another place")
    return RunError(
        f"{path} could not be written: {error.strerror or error}; no partial file is left; "
        f"{remedy_of_writing(error, path.parent)} or name another place"
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
