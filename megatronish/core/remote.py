"""Paths on object storage (s3://bucket/run, gs://..., any URL of fsspec) with the part of pathlib that is used here.

An object is written whole or not at all, and is never renamed. Reads ask for ranges: a rank that needs a part of a file
fetches that part, in blocks, and nothing is kept on a disk. Whatever a store raises becomes an OSError here, so callers
treat a store as they treat a disk.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from megatronish.core.errors import RunError, UserError, without_passwords
from megatronish.core.files import write_durably

# Listing of a folder of a store: every object below it, or an error.
#
# fsspec's walk, which is also the `find` of file systems without one of their own (files, memory, SFTP, HDFS), leaves
# out folders that it cannot read, whatever its argument on_error says. Checkpoints in such a folder would look like
# none.


def objects_below(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """Facts of all objects below a folder of an fsspec file system, by path; none if it is not there.

    Whatever the file system raises, except for a folder that is removed meanwhile.
    """
    if not _walks(fs):
        try:
            return dict(fs.find(path, detail=True))
        except FileNotFoundError:
            return {}
    objects: dict[str, dict[str, Any]] = {}
    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            listed = fs.ls(folder, detail=True)
        except FileNotFoundError:
            continue
        for facts in listed:
            if facts["type"] != "directory":
                objects[facts["name"]] = facts
            elif facts["name"].rstrip("/") != folder.rstrip("/"):
                folders.append(facts["name"])
    return objects


def _walks(fs: Any) -> bool:
    """Whether `find` of a file system, or of one that it wraps, is fsspec's walk."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    while isinstance(fs, AbstractFileSystem):
        own = type(fs)
        is_async = issubclass(own, AsyncFileSystem)
        if (own._find is AsyncFileSystem._find) if is_async else (own.find is AbstractFileSystem.find):
            return True
        fs = getattr(fs, "fs", None)
    return False


BLOCK_BYTES = 8 * 2**20
"""Bytes that one request reads ahead: ranks of the layout that was saved read their file from end to end."""

CONTENT_KEYS = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "Content-MD5", "Digest")
"""Names under which stores give what changes with the content of an object."""

PACKAGES = {"s3": "megatronish[s3]", "s3a": "megatronish[s3]", "hf": "huggingface_hub"}
"""What is installed for a protocol where it is not fsspec[protocol]."""

MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
"""What a user has to correct, by classes: fsspec gives many of its errors no number."""


class RemoteStatus(NamedTuple):
    """Facts of an object, under the names of os.stat_result."""

    st_size: int
    st_mode: int
    st_mtime: float


@dataclass(frozen=True, order=True, repr=False)
class RemotePath:
    """URL of an object, or of a folder: the objects whose names begin with it and a slash."""

    url: str

    def __str__(self) -> str:
        """The URL as it may be shown; `url` has its password."""
        return without_passwords(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """URL without its last part; a URL of one part is its own parent."""
        return RemotePath(self.url.rpartition("/")[0]) if "/" in self.url.partition("://")[2] else self

    def resolve(self) -> "RemotePath":
        """The same URL: it has no relative parts."""
        return self

    def is_dir(self) -> bool:
        """Whether it is a folder that holds an object."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self._kind() == "file"

    def exists(self) -> bool:
        """Whether it is an object or a folder that holds one."""
        return self._kind() is not None

    def stat(self) -> RemoteStatus:
        """Facts of the object; FileNotFoundError if it is not there."""
        info = self._call("info")
        at = next((info[key] for key in ("LastModified", "mtime", "created", "updated") if info.get(key)), 0.0)
        mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        if info["type"] == "file" and info["size"] is None:
            raise OSError(errno.EINVAL, "the server does not say how long it is; copy it to a disk first", str(self))
        return RemoteStatus(info["size"] or 0, mode, float(at.timestamp() if hasattr(at, "timestamp") else at))

    def identity(self) -> str:
        """What the store says of the content: its ETag or a hash. "" if it says nothing."""
        info = self._call("info")
        return next((str(info[key]) for key in CONTENT_KEYS if info.get(key)), "")

    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all objects in the folder, by name relative to it: one listing, however many they are."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            fs.invalidate_cache()
            objects = objects_below(fs, path)
        start = len(path.rstrip("/")) + 1
        return {name[start:]: info["size"] for name, info in objects.items() if info.get("type") == "file"}

    def open(self, mode: str = "rb", **_options: Any) -> "RemoteFile":
        """Open for reading, or for writing an object that is there once the file is closed."""
        fs, path = self._opened()
        reading: dict[str, Any] = {} if "w" in mode else {"block_size": BLOCK_BYTES, "cache_type": "readahead"}
        with _told_as_os_error(self.url):
            return RemoteFile(fs.open(path, mode, **reading), self.url)

    def read_bytes(self) -> bytes:
        """Content of the object."""
        return bytes(self._call("cat_file"))

    def read_range(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of the object."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            return bytes(fs.cat_file(path, start=start, end=end))

    def read_text(self) -> str:
        """Content of the object, text in UTF-8."""
        return self.read_bytes().decode()

    def write_text(self, text: str) -> None:
        """Write an object, or replace it: a reader sees the old text or the new one."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            if _is_local(fs):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_durably(Path(path), text)  # a disk, unlike a store, shows what is half written
            else:
                fs.pipe_file(path, text.encode())

    def unlink(self) -> None:
        """Remove the object; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self._call("rm_file")

    def remove_tree(self) -> None:
        """Remove the folder with all that is in it; nothing happens if it is not there."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                fs.rm(path, recursive=True)

    def download(self, into: Path) -> Path:
        """Copy the folder to a disk, as `into`; returns that."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            for name in self.sizes():
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(f"{path}/{name}", str(into / name))
        return into

    def download_file(self, into: Path) -> None:
        """Copy the object to a disk, as `into`, with its time."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            into.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(path, str(into))
            at = self.stat().st_mtime  # a picture must not look younger than the checkpoint after it
            os.utime(into, (at, at))

    def upload(self, file: Path) -> None:
        """Write an object with the content of a file, or replace it."""
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            fs.put_file(str(file), path)

    def _kind(self) -> str | None:
        """What it is, None if it is not there. fsspec's own questions take any error for a no."""
        try:
            return str(self._call("info")["type"])
        except FileNotFoundError:
            return None

    def _call(self, name: str) -> Any:
        fs, path = self._opened()
        with _told_as_os_error(self.url):
            fs.invalidate_cache()  # what another rank has written shows at once
            return getattr(fs, name)(path)

    def _opened(self) -> tuple[Any, str]:
        """File system and path in it. fsspec keeps one for each process and thread. UserError if there is none."""
        protocol = self.url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
            with _told_as_os_error(self.url):
                fs, path = url_to_fs(self.url, **options)
        except ImportError as error:
            extra = PACKAGES.get(protocol, f"fsspec[{protocol}]")
            raise UserError(f"{self.url} needs a package that is missing ({error}); pip install '{extra}'") from error
        return fs, path


class RemoteFile:
    """Open object: a binary file that raises OSError for what its store raises."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def read(self, length: int = -1) -> bytes:
        """Next `length` bytes, fewer where the object ends before."""
        with _told_as_os_error(self._url):
            return bytes(self._file.read(length))

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; how many there were."""
        with _told_as_os_error(self._url):
            return int(self._file.readinto(buffer))

    def write(self, data: Any) -> int:
        """Append; returns the number of bytes."""
        with _told_as_os_error(self._url):
            self._file.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int) -> int:
        """Go to a byte, for reading."""
        return int(self._file.seek(offset))

    def fileno(self) -> int:
        """There is none: io.UnsupportedOperation, as of other streams that are no file."""
        raise io.UnsupportedOperation("fileno")

    def flush(self) -> None:
        """Nothing: parts are sent when they are large enough, and the object is there after `close`."""

    def close(self) -> None:
        """End; what was written becomes an object."""
        with _told_as_os_error(self._url):
            self._file.close()

    def __enter__(self) -> "RemoteFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Location = Path | RemotePath
"""Folder or file of a checkpoint, on a disk or on object storage."""


def is_url(name: str | Path | None) -> bool:
    """Whether a name is a URL and not a path."""
    return "://" in str(name)


def location(name: str | Path) -> Location:
    """Path, or remote path for a URL."""
    return RemotePath(str(name).rstrip("/")) if is_url(name) else Path(name)


def is_outage(error: OSError) -> bool:
    """Whether a store did not answer, or not as it should: what another start may find otherwise."""
    return not isinstance(error, MISTAKES) and error.errno not in (errno.EINVAL, errno.EROFS)


def error_of_start(what: str, error: OSError, *, remedy: str) -> UserError | RunError:
    """Error that ends a start: of the user, or of a store that does not answer, after which a launcher tries again."""
    reason = error.strerror or error
    if is_outage(error):
        return RunError(f"{what}: {reason}; the store does not answer, start again once it does")
    return UserError(f"{what}: {reason}; {remedy}")


def refuse_unwritable(folder: RemotePath, *, flag: str) -> None:
    """UserError now, and not at the first checkpoint, if no object can be written there; RunError in an outage."""
    probe = folder / f".write_test_{os.uname().nodename}_{os.getpid()}"
    try:
        probe.write_text("megatronish writes its checkpoints here\n")
        probe.unlink()
    except OSError as error:
        remedy = "check its name, the credentials and the address of the store (AWS_ENDPOINT_URL), or choose another"
        raise error_of_start(f"{flag} {folder} cannot be written", error, remedy=remedy) from error


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


@contextmanager
def _told_as_os_error(url: str) -> Iterator[None]:
    """Context in which every error of a store, whatever its class, is an OSError with a line of text."""
    url = without_passwords(url)
    try:
        yield
    except ImportError:
        raise
    except OSError as error:
        if error.errno is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            raise
        reason = without_passwords(error.strerror or (str(error).splitlines() or [type(error).__name__])[0])[:300]
        if isinstance(error, FileNotFoundError):
            if (refusal := _http_refusal(error.__cause__, url)) is not None:
                raise refusal from error
            if url.endswith(reason.lstrip("/")):  # fsspec has no words for it, but the name alone
                reason = "there is no such object"
            raise FileNotFoundError(errno.ENOENT, reason, url) from error
        raise OSError(errno.EACCES if isinstance(error, MISTAKES) else errno.EIO, reason, url) from error
    except Exception as error:
        line, name = without_passwords((str(error).splitlines() or [""])[0])[:300], type(error).__name__
        # A store that can only be read, as https://, has no writing: another start finds the same.
        is_mistake = type(error) in (ValueError, TypeError, NotImplementedError)
        is_mistake = is_mistake or "Credentials" in name or "Validation" in name
        raise OSError(errno.EINVAL if is_mistake else errno.EIO, f"{name}: {line}", url) from error


def _http_refusal(cause: BaseException | None, url: str) -> OSError | None:
    """What was behind an object of https:// that is said not to be there: fsspec says so of every server that refuses,
    or does not answer. None if it is not there."""
    status = getattr(cause, "status", None)
    if cause is None or not url.startswith("http") or status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        return None
    number = errno.EACCES if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) else errno.EIO
    line = without_passwords((str(cause).splitlines() or [""])[0])[:300]
    return OSError(number, f"{type(cause).__name__}: {line}", url)
