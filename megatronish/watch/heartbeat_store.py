"""Board: where the ranks of a run leave their beats for each other, and the report of the one that reports.

The ranks of one machine share the folder in which they meet. Others share the store in which they meet, each over a
client of its own: a `get` that blocks on the main thread's client would keep the watchdog out.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

REPORT = "report"


class KeyValueStore(Protocol):
    """The part of a torch.distributed.Store that a board needs."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class Board(Protocol):
    """Texts by name, which all ranks see."""

    def put(self, name: str, text: str) -> None: ...
    def get(self, name: str) -> str | None: ...
    def claim(self, name: str) -> bool: ...


class FolderBoard:
    """Board in a folder: a file for each text, replaced by renaming."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, text: str) -> None:
        """Replace the text of this name."""
        aside = self.folder / f".{name}.{os.getpid()}"
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.folder / name)

    def get(self, name: str) -> str | None:
        """The text of this name, None if there is none."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def claim(self, name: str) -> bool:
        """Whether this call is the first one with this name, of all ranks."""
        try:
            (self.folder / f"{name}.claim").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class StoreBoard:
    """Board in a store, over a client that no other thread uses."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def put(self, name: str, text: str) -> None:
        """Replace the text of this name."""
        self._store.set(f"watch/{name}", text)

    def get(self, name: str) -> str | None:
        """The text of this name, None if there is none."""
        key = f"watch/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def claim(self, name: str) -> bool:
        """Whether this call is the first one with this name, of all ranks."""
        return self._store.add(f"watch/{name}.claim", 1) == 1


class OwnBoard:
    """Board of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        """Replace the text of this name."""
        self._texts[name] = text

    def get(self, name: str) -> str | None:
        """The text of this name, None if there is none."""
        return self._texts.get(name)

    def claim(self, name: str) -> bool:
        """Whether this call is the first one with this name."""
        return self._texts.setdefault(f"{name}.claim", name) is name


class BoardTimeoutError(Exception):
    """A board does not answer: the host of the store hangs, or is cut off."""


class PatientBoard:
    """A board whose calls end after some seconds, however long the board under it blocks: a thread of its own calls it.

    After a call that did not end, each further one fails at once until that call has ended.
    """

    def __init__(self, board: Board, *, seconds: float = 2.0) -> None:
        self._board, self._seconds = board, seconds
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[str, ...], SimpleQueue[Any]]] = SimpleQueue()
        self._is_blocked = threading.Event()
        threading.Thread(target=self._serve, name="watchdog's board", daemon=True).start()

    def put(self, name: str, text: str) -> None:
        """Replace the text of this name."""
        self._call(self._board.put, name, text)

    def get(self, name: str) -> str | None:
        """The text of this name, None if there is none."""
        found: str | None = self._call(self._board.get, name)
        return found

    def claim(self, name: str) -> bool:
        """Whether this call is the first one with this name, of all ranks."""
        return bool(self._call(self._board.claim, name))

    def _call(self, function: Callable[..., Any], *arguments: str) -> Any:
        if self._is_blocked.is_set():
            raise BoardTimeoutError
        answer: SimpleQueue[Any] = SimpleQueue()
        self._calls.put((function, arguments, answer))
        try:
            result = answer.get(timeout=self._seconds)
        except Empty:
            self._is_blocked.set()
            raise BoardTimeoutError from None
        if isinstance(result, Exception):
            raise result
        return result

    def _serve(self) -> None:
        while True:
            function, arguments, answer = self._calls.get()
            try:
                result = function(*arguments)
            except Exception as error:
                result = error
            answer.put(result)
            self._is_blocked.clear()
