"""Files and folders in places into which other users can write: a temporary directory, a cache that a group shares.

Whoever can guess the name of a file there may have made it before, or a link of its name that leads to a file of ours.
So what is written there is never written through a link, and what is read or loaded is this user's.
"""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags of open for a name that another user may have taken: a link is an OSError, and no pipe is waited for."""


def private_folder(folder: Path) -> Path:
    """The folder, made if it is missing, into which this user alone can write; OSError if it is not this user's.

    In a directory that all users share, another one may have made it before, or a link of its name.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "another user has made it, or it is a link", str(folder))
    if status.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
    return folder


def cache_folder() -> Path:
    """Private folder of what is made once for a user: in the user's cache folder, else in the temporary directory.

    OSError where neither can be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "megatronish"
    with suppress(OSError):
        private_folder(folder)
        with tempfile.TemporaryFile(dir=folder):  # not os.access: some disks refuse what its modes allow
            return folder
    return private_folder(Path(tempfile.gettempdir()) / f"megatronish-cache-{os.getuid()}")


def is_own(path: Path) -> bool:
    """Whether something of this name is there, and this user has made it."""
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def read_own(path: Path, *, largest: int) -> bytes:
    """Content of a file of this user; OSError for a link, another user's file, what is no file, and a larger one."""
    descriptor = os.open(path, os.O_RDONLY | NO_LINK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size > largest:
            raise PermissionError(errno.EPERM, "another user has made it, or it is no such file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(largest)
    finally:
        os.close(descriptor)


def opened_lock(path: Path) -> BinaryIO:
    """A file to be locked, made if it is missing; nothing is written into it. OSError for a link."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)  # NFS locks what is open for writing
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | NO_LINK)  # another user's, in a folder of both
    return os.fdopen(descriptor, "rb")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context of one process at a time; of all, where there is no such file or the file system has no locks."""
    try:
        file = opened_lock(path)
    except OSError:
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
