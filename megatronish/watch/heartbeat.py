"""Beats: what a rank says of itself to the other ranks, once a second or so, as JSON; and the board that carries them.

Clocks of machines differ, so a beat has durations and no times; a reader notes by its own clock when a beat was new.

The ranks of one machine share the folder in which they meet. Others share the store in which they meet, each over a
client of its own: a `get` that blocks on the main thread's client would keep the watchdog out.
"""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

PIECES_DIFFER = ("all_to_all_rows", "deep_ep_combine", "all_gather_object")
"""Operations whose tensors may differ between the ranks of a line."""


@dataclass(frozen=True)
class Collective:
    """An entry of a rank's record in words: `where` is "layer 12, forward of micro-batch 3" or empty."""

    line: str
    axis: str
    number: int
    operation: str
    shape: list[int] | None = None
    dtype: str = ""
    where: str = ""
    seconds: float = 0.0
    peer: int | None = None
    by: int = 0  # the rank that entered it

    @property
    def name(self) -> str:
        """all_gather 4,711 of tp."""
        return f"{self.operation} {self.number:,} of {self.axis}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What ranks of one line must agree on for one number."""
        if self.operation in PIECES_DIFFER:
            return (self.operation,)
        return self.operation, tuple(self.shape or ()), self.dtype


@dataclass(frozen=True)
class ThreadBeat:
    """What one thread of a rank does: "main", or "save" in the background.

    `idle` are the seconds since its last progress, `limit` how many are allowed. `stack` has the innermost frame first.
    `in_torch`: no collective of ours is waited for, but one of torch's own.
    """

    name: str
    phase: str
    detail: str
    idle: float
    limit: float
    waiting: Collective | None = None
    stack: list[str] = field(default_factory=list)
    in_torch: str = ""
    helper_stack: list[str] = field(default_factory=list)

    @property
    def is_overdue(self) -> bool:
        """Whether it has made no progress for longer than its phase may take."""
        return self.idle > self.limit


@dataclass(frozen=True)
class Beat:
    """The state of one rank. `number` grows with every beat; `ended` says how a rank left that is no longer there.

    `lines` has the number of the newest collective of each line. A rank that pauses adds the last ones of each,
    `recent`, and the ranks of each, `members`.
    """

    rank: int
    number: int
    host: str
    pid: int
    born: str
    step: int
    threads: list[ThreadBeat]
    lines: dict[str, int]
    recent: dict[str, list[Collective]] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    ended: str = ""

    def thread(self, name: str) -> ThreadBeat | None:
        """The thread of this name, if the rank has it."""
        return next((thread for thread in self.threads if thread.name == name), None)

    def to_json(self) -> str:
        """The beat as text."""
        return json.dumps(asdict(self), separators=(",", ":"))


def bare_beat(rank: int, recent: dict[str, list[Collective]]) -> Beat:
    """A beat of a rank of which only the last collectives are known."""
    return Beat(rank, 0, "", 0, "", 0, [], {line: several[-1].number for line, several in recent.items()}, recent)


def beat_of(text: str) -> Beat:
    """The beat that a text holds."""
    fields = json.loads(text)
    threads = [
        ThreadBeat(**{**each, "waiting": None if each["waiting"] is None else Collective(**each["waiting"])})
        for each in fields.pop("threads")
    ]
    recent = {line: [Collective(**each) for each in several] for line, several in fields.pop("recent").items()}
    return Beat(**fields, threads=threads, recent=recent)


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
        # A watchdog that a slow disk keeps may still write when its rank says its last word.
        aside = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
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
        text: str | None = self._call(self._board.get, name)
        return text

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
