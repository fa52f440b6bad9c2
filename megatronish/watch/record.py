"""Record of what a rank does: its last collectives, the one that each thread waits for, and the phase it is in.

Every collective of comm.py is an entry, numbered on its line (the ranks of one process group). Ranks of a line make the
same collectives in the same order, so equal numbers mean the same collective: a rank whose number is lower has not
entered it. An entry costs 1 to 2 microseconds: a tuple in a ring. All that is made of entries (text, comparison) is
left to the thread of the watchdog, which reads them from outside.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import Any, Literal, NamedTuple

from megatronish.watch.shared_ring import RING, SharedRing

PhaseName = Literal["start", "data", "step", "hook", "evaluation", "save", "end"]
_STEPS = 50  # of whose times the median is taken


class Entry(NamedTuple):
    """One collective, send or receive that was started. `peer` is the other rank of a send or receive."""

    line: "LineRecord"
    number: int
    operation: str
    shape: Any
    dtype: Any
    layer: int | None
    action: Any
    since: float
    peer: int | None = None


class RunPhase(NamedTuple):
    """Part of the run that a thread is in. `since` is on the monotonic clock, `detail` for people."""

    name: PhaseName
    detail: str
    since: float


class LineRecord:
    """Numbering of the collectives over one line of ranks; sends and receives are numbered for each peer."""

    __slots__ = ("_numbers", "_peers", "index", "key", "last", "name", "ranks", "record", "sent")

    def __init__(self, record: "RankRecord", name: str, ranks: Sequence[int], *, key: str, index: int) -> None:
        self.record, self.name, self.ranks, self.key, self.index = record, name, tuple(ranks), key, index
        self.last = 0  # number of the newest collective
        self._numbers = itertools.count(1)
        self._peers: dict[tuple[str, int], Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self.sent: dict[str, int] = defaultdict(int)  # bytes of each operation's tensors, while they are counted

    def enter(self, operation: str, x: Any, layer: int | None = None) -> Entry:
        """Note that this rank starts a collective with a tensor x. `layer` is that of a backward."""
        record, shape, dtype = self.record, x.shape, x.dtype
        self.last = number = next(self._numbers)
        place = next(record.count) % RING
        if record.shared is not None:
            record.shared.add(place, self.index, (operation, shape, dtype), number)
        if layer is None:
            layer = record.layer
        # Without the checks of a NamedTuple's constructor, which take as long as all the rest.
        entry = _entry(Entry, (self, number, operation, shape, dtype, layer, record.action, monotonic(), None))
        record.ring[place] = record.newest[get_ident()] = entry
        if record.counts_bytes:
            self.sent[operation] += x.nbytes
        return entry

    def enter_objects(self, operation: str) -> Entry:
        """Note that this rank starts a collective of pickled objects."""
        record = self.record
        self.last = number = next(self._numbers)
        place = next(record.count) % RING
        if record.shared is not None:
            record.shared.add(place, self.index, (operation, None, None), number)
        entry = Entry(self, number, operation, None, None, None, None, monotonic())
        record.ring[place] = record.newest[get_ident()] = entry
        return entry

    def enter_peer(self, operation: str, x: Any, peer: int) -> Entry:
        """Note that this rank starts a send to, or a receive from, the global rank `peer`."""
        record = self.record
        number = next(self._peers[operation, peer])
        entry = Entry(self, number, operation, x.shape, x.dtype, record.layer, record.action, monotonic(), peer)
        record.ring[next(record.count) % RING] = record.newest[get_ident()] = entry
        if record.counts_bytes:
            self.sent[operation] += x.nbytes
        return entry

    def count(self, operation: str, x: Any) -> None:
        """Count the bytes of a tensor x that another library sends over this line, while bytes are counted."""
        if self.record.counts_bytes:
            self.sent[operation] += x.nbytes


_entry = tuple.__new__


class RankRecord:
    """What one rank does, for its watchdog to read. The mesh owns it.

    `action` and `layer` are what the main thread computes; `newest`, `waiting` and `phases` are kept for each thread.
    """

    def __init__(self) -> None:
        self.shared: SharedRing | None = None  # set before there are lines
        self.ring: list[Entry | None] = [None] * RING
        self.count = itertools.count()
        self.lines: list[LineRecord] = []
        self.newest: dict[int, Entry] = {}
        self.waiting: dict[int, Entry | None] = {}
        self.phases: dict[int, RunPhase] = {}
        self.recorded: set[Any] = set()  # transfers in progress that torch's profiler has recorded
        self.action: Any = None
        self.layer: int | None = None
        self.step = 0  # the step at work, counted from 1
        self.num_steps_seen = 0
        self.counts_bytes = False
        self.main_thread = get_ident()
        self._born = monotonic()
        self._spent: dict[PhaseName, float] = defaultdict(float)
        self.seconds_waited = 0.0  # by the main thread, for collectives
        self.clock: Callable[[], Any] = monotonic
        self.waits: Callable[[Any, Any], None] = self._add_wait
        self._seconds: deque[float] = deque(maxlen=_STEPS)

    def _add_wait(self, start: float, end: float) -> None:
        self.seconds_waited += end - start

    def line(self, name: str, ranks: Sequence[int]) -> LineRecord:
        """A new line of these ranks. Its key is the same on all of them, if they make their lines in one order."""
        key = f"{name}:{ranks[0]}+{len(ranks)}"
        copies = sum(line.key.partition("#")[0] == key for line in self.lines)
        made = LineRecord(self, name, ranks, key=f"{key}#{copies}" if copies else key, index=len(self.lines))
        self.lines.append(made)
        if self.shared is not None:
            self.shared.add_line(made.index, made.key)
        return made

    def count_bytes(self) -> None:
        """Count the bytes of all transfers from now on, from zero; until `counts_bytes` is False again."""
        for line in self.lines:
            line.sent.clear()
        self.counts_bytes = True

    def wait_for_recorded(self) -> None:
        """Wait for every transfer in progress that torch's profiler has recorded: before it stops."""
        for transfer in list(self.recorded):
            transfer.wait()

    def phase(self, name: PhaseName, detail: str = "") -> "_Within":
        """Context in which this thread is in a phase; after it the thread is in the phase before again."""
        return _Within(self, name, detail)

    def enter_phase(self, name: PhaseName, detail: str = "") -> None:
        """Let this thread be in a phase until it enters another."""
        self._switch(get_ident(), RunPhase(name, detail, monotonic()))

    def _switch(self, thread: int, phase: RunPhase | None) -> None:
        """Let a thread be in another phase; the seconds of the main thread's are added up by name."""
        before = self.phases.get(thread)
        if phase is None:
            self.phases.pop(thread, None)
        else:  # replaced in one move: a watchdog may look at any moment
            self.phases[thread] = phase
        if before is not None and thread == self.main_thread:
            self._spent[before.name] += monotonic() - before.since

    def age(self) -> float:
        """Seconds since this record was made, at the beginning of its rank."""
        return monotonic() - self._born

    def seconds_by_phase(self) -> dict[PhaseName, float]:
        """Seconds that the main thread has spent in each phase so far."""
        now = self.phases.get(self.main_thread)
        spent = dict(self._spent)
        if now is not None:
            spent[now.name] = spent.get(now.name, 0.0) + monotonic() - now.since
        return spent

    def finished_step(self, seconds: float) -> None:
        """Note how long a step took, waiting for its data included."""
        self.num_steps_seen += 1
        if self.num_steps_seen > 1:  # the first one compiles and connects
            self._seconds.append(seconds)

    @property
    def median_step(self) -> float | None:
        """Median seconds of the last steps; None until there are three, the first one aside."""
        return median(self._seconds) if len(self._seconds) > 2 else None


class _Within:
    """Context of a phase of one thread."""

    __slots__ = ("_before", "_detail", "_name", "_record")

    def __init__(self, record: RankRecord, name: PhaseName, detail: str) -> None:
        self._record, self._name, self._detail = record, name, detail

    def __enter__(self) -> None:
        phases = self._record.phases
        self._before = phases.get(get_ident())
        self._record._switch(get_ident(), RunPhase(self._name, self._detail, monotonic()))

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        before = self._before and self._before._replace(since=monotonic())
        self._record._switch(get_ident(), before)
