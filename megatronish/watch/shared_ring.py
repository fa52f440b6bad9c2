"""Ring of a rank's last collectives in a file that is mapped into memory: it outlives the process, however it ends.

gloo ends a process by SIGABRT where the sizes of ranks differ, and what it was about is read here by the others. What
is written for each collective are three numbers; the names and shapes behind them are written once, as lines of JSON.
"""

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

from megatronish.core.private import private_folder
from megatronish.watch.heartbeat import PIECES_DIFFER, Collective

RING = 256
_SLOT = Struct("<IIQ")  # line, kind, number
_TABLE = RING * _SLOT.size  # where the table begins
_SIZE = _TABLE + 2**17
_UNKNOWN = 0  # kind of what found no room in the table


class SharedRing:
    """Writer of a ring, in a folder of this user alone. OSError if there is no room for it, or none such a folder.

    All of the file is written first: a page without room on the disk would end the process by SIGBUS when it is used.
    """

    __slots__ = ("_end", "_kinds", "_memory")

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "wb+") as file:
                file.write(bytes(_SIZE))
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _SIZE)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise
        self._end = _TABLE
        self._kinds: dict[tuple[Any, ...], int] = {}

    def add_line(self, number: int, key: str) -> None:
        """Note what the number of a line means."""
        self._note({"line": number, "key": key})

    def add(self, place: int, line: int, kind: tuple[Any, ...], number: int) -> None:
        """Note collective `number` of a line; kind is (operation, shape, dtype)."""
        index = self._kinds.get(kind)
        if index is None:
            index = self._new_kind(kind)
        _SLOT.pack_into(self._memory, place * _SLOT.size, line, index, number)

    def _new_kind(self, kind: tuple[Any, ...]) -> int:
        operation, shape, dtype = kind
        if operation in PIECES_DIFFER:
            shape, dtype = None, ""
        index = len(self._kinds) + 1
        name = str(dtype or "").removeprefix("torch.")
        shape = None if shape is None else list(shape)
        known = self._note({"kind": index, "operation": operation, "shape": shape, "dtype": name})
        self._kinds[kind] = index if known else _UNKNOWN
        return self._kinds[kind]

    def _note(self, what: dict[str, Any]) -> bool:
        text = json.dumps(what).encode() + b"\n"
        if self._end + len(text) > _SIZE:
            return False
        self._memory[self._end : self._end + len(text)] = text
        self._end += len(text)
        return True


def read_ring(path: Path, rank: int) -> dict[str, list[Collective]]:
    """The last collectives of each line in a rank's ring; empty if there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    if len(data) != _SIZE:
        return {}
    notes = [json.loads(line) for line in data[_TABLE:].rstrip(b"\0").splitlines()]
    lines = {note["line"]: note["key"] for note in notes if "line" in note}
    kinds = {note["kind"]: note for note in notes if "kind" in note}
    entries_by_line: dict[str, list[Collective]] = {}
    for entry in _slots(data, lines, kinds, rank):
        entries_by_line.setdefault(entry.line, []).append(entry)
    return {line: sorted(several, key=lambda entry: entry.number) for line, several in entries_by_line.items()}


def _slots(data: bytes, lines: dict[int, str], kinds: dict[int, Any], rank: int) -> Iterator[Collective]:
    for line, kind, number in _SLOT.iter_unpack(data[:_TABLE]):
        if number and line in lines and kind in kinds:
            what = kinds[kind]
            key = lines[line]
            yield Collective(
                line=key,
                axis=key.partition(":")[0],
                number=number,
                operation=what["operation"],
                shape=what["shape"],
                dtype=what["dtype"],
                by=rank,
            )
