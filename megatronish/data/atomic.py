"""How does a file appear under its name only when it is whole? Written beside it, flushed to the disk, renamed."""

import os
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType


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
            _sync_folder(self.path.parent)
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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
