"""Mapped files: arrays in files that are read as memory, and a check that no file has become shorter since.

A read beyond the end of a mapped file ends the process with SIGBUS, which no handler can turn into an error. So readers
of long runs check the size before they read: half a microsecond a file.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatronish.core.errors import RunError


class MappedArray:
    """The values of a file from byte `offset` on, as a read-only array [n]; an empty file has none.

    OSError if the file cannot be opened, ValueError if its size is no whole number of values.
    """

    def __init__(self, path: Path, dtype: DTypeLike, *, offset: int = 0) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._size = path.stat().st_size
        self.values: NDArray[Any] = np.empty(0, dtype)
        if self._size > offset:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
            self.values = np.frombuffer(self._map, dtype, offset=offset)

    def check(self) -> None:
        """RunError if the file has become shorter since it was mapped."""
        if self._map is not None and (size := self._map.size()) < self._size:
            raise RunError(
                f"{self.path} has {size} bytes and had {self._size} when this run opened it: another process has cut "
                "it short; copy or make it again, and start again: the run continues from its newest checkpoint"
            )
