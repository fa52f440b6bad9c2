"""Verdict on a run that makes no progress: which ranks hang, from the beats of all ranks, and the sentence about each.

A rank that waits in a collective waits for the ranks of its line that have not entered it; one that waits for a receive
waits for its peer. Followed to its end, that leads to ranks that wait for no other: they are silent, have ended, or are
somewhere outside of any collective. These are the ranks that hang. Where it leads round in a circle, ranks do different
things; where all ranks have entered a collective, it is the transfer that hangs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatronish.core.layout import Layout
from megatronish.launch.pulse import why_silent
from megatronish.watch.heartbeat import Beat, Collective, ThreadBeat
from megatronish.watch.observer import MAIN, birth_of

CulpritKind = Literal["silent", "missing", "ended", "outside", "different", "circle", "transfer"]


@dataclass(frozen=True)
class Culprit:
    """A rank that hangs, or that does something else than the others.

    `lacks` is the collective that holds it up: one that it has not entered; of a "circle" or a "transfer" the one in
    which it waits; of a rank that is "different" the one that it entered in place of `other`.
    """

    rank: int
    kind: CulpritKind
    thread: ThreadBeat | None = None
    lacks: Collective | None = None
    seconds: float = 0.0
    other: Collective | None = None  # what most ranks do under the same number


@dataclass(frozen=True)
class RanksSeen:
    """What is known of all ranks: the newest beat of each, and how many seconds silent ones have been silent."""

    size: int
    beats: Mapping[int, Beat]
    silent: Mapping[int, float] = field(default_factory=dict)

    def state(self, rank: int, thread: str) -> ThreadBeat | None:
        """The thread of a rank that stands for it: of a main thread that waits for a save, the saving one."""
        beat = self.beats.get(rank)
        if beat is None:
            return None
        state = beat.thread(thread)
        # A main thread that waits for the save in the background hangs only if the saving thread does.
        saving = next((each for each in beat.threads if each.name != MAIN and each.waiting is not None), None)
        if state is not None and state.name == MAIN and state.waiting is None and state.helper_stack and saving:
            return saving
        return state


def verdict(seen: RanksSeen, *, thread: str = MAIN) -> list[Culprit]:
    """The ranks that hang; empty if every rank that is waited for is still at work within its limit."""
    # 1. Ranks that do different things. First, as what they wait for says nothing then: their numbers do not mean the
    # same.
    if odd := different(seen):
        return odd
    # 2. Who waits for whom, edges from a rank to those that have not entered its collective.
    states = {rank: seen.state(rank, thread) for rank in range(seen.size)}
    edges = {rank: list(_waits_for(seen, rank, state)) for rank, state in states.items() if _can_wait(seen, rank)}
    # On a GPU no rank waits in a collective, only for its device: then the numbers alone tell who is behind.
    if thread == MAIN and not any(edges.values()):  # what a main thread has entered says nothing of another thread
        edges = {rank: list(_behind(seen, rank)) for rank in edges}
    # 3. Ranks that cannot come any more explain everything that waits for them, so nothing else is reported.
    lacks = {rank: _lacking(rank, edges) for rank in range(seen.size)}
    gone = [_gone(seen, rank, lacks[rank], states[rank]) for rank in range(seen.size)]
    if any(gone):
        return [culprit for culprit in gone if culprit is not None]
    # 4. Ranks that are in no collective while others are: a loop of their own, data, a disk. Those that others lack
    # come first.
    outside = [
        Culprit(rank, "outside", state, lacks[rank], state.idle)
        for rank, state in states.items()
        if state is not None and not edges.get(rank) and state.waiting is None and not state.in_torch
    ]
    awaited = [culprit for culprit in outside if culprit.lacks is not None] or outside
    if awaited:
        # Ranks that are still at work are no reason to end a run, however long others wait for them.
        return [culprit for culprit in awaited if culprit.thread is not None and culprit.thread.is_overdue]
    # 5. No rank is outside. One in a collective of torch's own, which has no number here, may keep the others waiting.
    stray = [
        Culprit(rank, "outside", state, lacks[rank], state.idle)
        for rank, state in states.items()
        if state is not None and state.in_torch and state.is_overdue and lacks[rank] is not None
    ]
    if stray:  # in a collective of torch's own, while others wait for it in another
        return stray
    # 6. All wait, and for each other: two collectives in another order on each rank, for example.
    if circle := _circle(edges):
        return [Culprit(rank, "circle", states[rank], entry, _idle(states[rank])) for rank, entry in circle]
    # 7. All have entered one collective, and it does not end: the network, or the device.
    return [
        Culprit(rank, "transfer", state, state.waiting, state.idle)
        for rank, state in states.items()
        if state is not None and state.is_overdue and not edges.get(rank) and not _has_newcomer(state, states.values())
    ]


def _has_newcomer(state: ThreadBeat, others: Iterable[ThreadBeat | None]) -> bool:
    """Whether a rank has entered the same collective not long ago: it may still end, or show what that rank does."""
    if state.waiting is None or state.waiting.peer is not None:
        return False
    # Ranks arrive at different times: as long as one of them has just come, the transfer has not had its time.
    mine = state.waiting.line, state.waiting.number
    inside = [other for other in others if other is not None and other.waiting is not None and not other.is_overdue]
    return any((other.waiting.line, other.waiting.number) == mine for other in inside if other.waiting is not None)


def _can_wait(seen: RanksSeen, rank: int) -> bool:
    return rank in seen.beats and rank not in seen.silent and not seen.beats[rank].ended


def _gone(seen: RanksSeen, rank: int, lacks: Collective | None, state: ThreadBeat | None) -> Culprit | None:
    """The culprit if a rank is no longer there; one that has ended as it should is none unless others wait for it."""
    if rank not in seen.beats:
        return Culprit(rank, "missing", None, lacks)
    if seen.beats[rank].ended:
        return None if lacks is None else Culprit(rank, "ended", None, lacks, lacks.seconds)
    if rank in seen.silent:
        seconds = max(seen.silent[rank], 0.0 if lacks is None else lacks.seconds)
        return Culprit(rank, "silent", state, lacks, seconds)
    return None


def _lacking(rank: int, edges: Mapping[int, Sequence[tuple[int, Collective]]]) -> Collective | None:
    """The collective in which most ranks wait for this one."""
    waits = [entry for several in edges.values() for other, entry in several if other == rank]
    counts = Counter((entry.line, entry.number) for entry in waits)
    return max(waits, key=lambda each: (counts[each.line, each.number], each.seconds), default=None)


def _circle(edges: Mapping[int, Sequence[tuple[int, Collective]]]) -> list[tuple[int, Collective]]:
    """Ranks that wait for each other in a circle, each with what it waits in; empty if there are none."""
    for first in edges:
        # Follow the first edge of each rank. From any start this ends at a rank that waits for none, or meets the path
        # again.
        path, rank = dict[int, Collective](), first
        while edges.get(rank) and rank not in path:
            other, path[rank] = edges[rank][0]
            rank = other
        if rank in path:
            ranks = list(path)
            return [(each, path[each]) for each in ranks[ranks.index(rank) :]]
    return []


def different(seen: RanksSeen) -> list[Culprit]:
    """Ranks whose collective of some number is another one than that of most ranks of the line: the earliest such."""
    for ranks in _by_line(seen).values():
        # Only numbers that all of these ranks have: the records of each hold its last entries alone. The earliest
        # difference is the cause, as later numbers are shifted by it.
        common = set.intersection(*(set(numbers) for numbers in ranks.values()))
        for number in sorted(common):
            kinds = Counter(entries[number].kind for entries in ranks.values())
            if len(kinds) < 2:
                continue
            usual = kinds.most_common(1)[0][0]
            example = next(each[number] for each in ranks.values() if each[number].kind == usual)
            odd = [rank for rank, entries in ranks.items() if entries[number].kind != usual]
            return [
                Culprit(rank, "different", seen.state(rank, MAIN), mine := ranks[rank][number], mine.seconds, example)
                for rank in odd
            ]
    return []


def _by_line(seen: RanksSeen) -> dict[str, dict[int, dict[int, Collective]]]:
    """{line: {rank: {number: entry}}} of lines that at least two ranks tell of."""
    ranks_by_line: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, beat in seen.beats.items():
        for line, entries in beat.recent.items():
            ranks_by_line.setdefault(line, {})[rank] = {entry.number: entry for entry in entries}
    return {line: ranks for line, ranks in ranks_by_line.items() if len(ranks) > 1}


def _waits_for(seen: RanksSeen, rank: int, state: ThreadBeat | None) -> Iterator[tuple[int, Collective]]:
    """The ranks that a rank waits for, with the collective that they have not entered."""
    entry = None if state is None else state.waiting
    if entry is None:
        return
    # A receive has one peer; a collective lacks each member whose newest number on this line is lower.
    if entry.peer is not None:
        yield entry.peer, entry
        return
    for other in seen.beats[rank].members.get(entry.line, ()):
        beat = seen.beats.get(other)
        if other != rank and (beat is None or beat.lines.get(entry.line, 0) < entry.number):
            yield other, entry


def _behind(seen: RanksSeen, rank: int) -> Iterator[tuple[int, Collective]]:
    """The ranks that have not entered what this one has, by numbers alone.

    On a GPU the host waits for the device and in no collective, and its record does not say for which entry.
    """
    beat = seen.beats[rank]
    for line, ranks in beat.members.items():
        for other in ranks:
            known = seen.beats.get(other)
            # A rank without a beat, or without this line, says nothing about it; one whose number is as high is not
            # behind.
            if known is None or line not in known.lines or known.lines[line] >= beat.lines.get(line, 0):
                continue
            entry = next((each for each in beat.recent.get(line, ()) if each.number == known.lines[line] + 1), None)
            if entry is not None:
                yield other, entry


def _idle(state: ThreadBeat | None) -> float:
    return 0.0 if state is None else state.idle


_FRAMES = 5
_MOST = 4  # culprits that are described, of which there can be a whole machine


class RankWords:
    """Sentences about the ranks of a layout, written by the process of host `host`."""

    def __init__(self, layout: Layout, *, host: str) -> None:
        self.layout, self.host = layout, host

    def rank(self, rank: int) -> str:
        """rank 13 (tp 1, dp 0, pp 3): sizes of one are left out."""
        place = self.layout.coordinates(rank)
        sizes = {axis: getattr(self.layout, axis) for axis in ("tp", "cp", "dp", "pp")}
        parts = [f"{axis} {getattr(place, axis)}" for axis, size in sizes.items() if size > 1]
        return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"

    def report(self, culprits: Sequence[Culprit], seen: RanksSeen) -> str:
        """The sentences about the ranks that hang, one line each; the first of several has the circumstances."""
        if culprits[0].kind == "circle":
            return self._circle(culprits)
        if culprits[0].kind == "transfer":
            return self._transfer(culprits)
        lines = [self._sentence(culprit, seen) for culprit in culprits[:_MOST]]
        if len(culprits) > _MOST:
            lines.append(
                f"so do {len(culprits) - _MOST} more: ranks {', '.join(str(c.rank) for c in culprits[_MOST:])}"
            )
        return "\n".join(lines)

    def without_others(self, rank: int, thread: ThreadBeat, beat: Beat, *, kept_by: str) -> str:
        """What one rank says that hangs, or waits, and cannot ask the others."""
        entry = thread.waiting
        waits = f"waits in {_named(entry)}" if entry is not None else "has made no progress"
        return (
            f"{kept_by or 'the place of the beats of all ranks'} does not answer: it is stopped, dead or cut off. "
            f"{self.rank(rank)} {waits} for {thread.idle:.0f} s. It is {_phase(thread, beat)}{_stack(thread)}"
        )

    def seen(self, thread: ThreadBeat, beat: Beat) -> str:
        """in step 9. Its stack: ... < ..."""
        return f"{_phase(thread, beat)}{_stack(thread)}"

    def _sentence(self, culprit: Culprit, seen: RanksSeen) -> str:
        who, lacks = self.rank(culprit.rank), culprit.lacks
        beat = seen.beats.get(culprit.rank)
        if culprit.kind == "different":
            return self._different(culprit, seen)
        if culprit.kind == "missing" or beat is None:
            # Others that are in a collective have met it before, so it was stopped, or lost, before its first beat.
            came = "has not come to the run at all" if lacks is None else "has been silent since its first moment"
            return f"{who} {came}{self._waited(lacks)}; look for its process and its log"
        if culprit.kind == "ended":
            return f"{who} has {beat.ended}{self._waited(lacks)}"
        for_seconds = f"for {culprit.seconds:.0f} s"
        said = f"{who} {_has_not(lacks)} {for_seconds}; {_others(lacks)} there. " if lacks is not None else f"{who} "
        if culprit.kind == "silent":
            silent = f"It is silent {for_seconds}" if lacks is not None else f"is silent {for_seconds}"
            what = f"process {beat.pid} on {beat.host} {_why_silent(beat, self.host)}"
            seen_in = culprit.thread or beat.thread(MAIN)  # its last beat may be older than the thread of a save
            return f"{said}{silent}: {what}. It was last seen {_phase(seen_in, beat)}{_stack(seen_in)}"
        said += "It is " if lacks is not None else f"has made no progress {for_seconds}. It is "
        return f"{said}{_phase(culprit.thread, beat)}{_stack(culprit.thread)}"

    def _waited(self, lacks: Collective | None) -> str:
        return "" if lacks is None else f" and {_has_not(lacks)}; {_others(lacks)} there for {lacks.seconds:.0f} s"

    def _different(self, culprit: Culprit, seen: RanksSeen) -> str:
        assert culprit.lacks is not None
        assert culprit.other is not None
        mine, usual = culprit.lacks, culprit.other
        other = next(
            rank
            for rank, beat in seen.beats.items()
            if any(
                (entry.number, entry.kind) == (usual.number, usual.kind) for entry in beat.recent.get(usual.line, [])
            )
        )
        return (
            f"ranks do different things: in collective {mine.number:,} of {mine.axis} {self.rank(culprit.rank)} "
            f"entered {_spelled(mine)}, and {self.rank(other)} {_spelled(usual)}"
            f"{_stack(culprit.thread, of=culprit.rank)}"
        )

    def _circle(self, culprits: Sequence[Culprit]) -> str:
        turns = [f"{self.rank(each.rank)} waits in {_named(each.lacks)}" for each in culprits[:_MOST] if each.lacks]
        return (
            f"ranks do different things and wait for each other for {max(each.seconds for each in culprits):.0f} s: "
            f"{', '.join(turns)}{_stack(culprits[0].thread, of=culprits[0].rank)}"
        )

    def _transfer(self, culprits: Sequence[Culprit]) -> str:
        first = culprits[0]
        what = _named(first.lacks) if first.lacks else f"torch's {first.thread.in_torch if first.thread else ''}"
        ranks = ", ".join(self.rank(culprit.rank) for culprit in culprits[:_MOST])
        why = "has been entered by all of its ranks and" if first.lacks else "of which no record is kept"
        wait = "waits" if len(culprits) == 1 else "wait"
        return (
            f"{what} {why} does not end for {first.seconds:.0f} s: the network between them, or the backend, hangs"
            f"{'' if first.lacks else ', or a rank has not entered it'}. "
            f"{ranks}{' and more' if len(culprits) > _MOST else ''} {wait} there{_stack(first.thread)}"
        )


def _named(entry: Collective | None) -> str:
    assert entry is not None
    name = entry.name if entry.peer is None else f"the {entry.operation} {entry.number:,} over {entry.axis}"
    return f"{name} ({entry.where})" if entry.where else name


def _has_not(entry: Collective) -> str:
    """What a rank has not done for which another one waits in `entry`."""
    if entry.peer is None:
        return f"has not entered {_named(entry)}"
    verb = "sent" if entry.operation == "receive" else "received"
    where = f" ({entry.where})" if entry.where else ""
    return f"has not {verb} message {entry.number:,} over {entry.axis}{where}"


def _others(entry: Collective | None) -> str:
    return "the others wait" if entry is None or entry.peer is None else f"rank {entry.by} waits"


def _spelled(entry: Collective) -> str:
    shape = "" if entry.shape is None else f" of {entry.shape} {entry.dtype}"
    return f"{entry.operation}{shape}{f' ({entry.where})' if entry.where else ''}"


def _phase(thread: ThreadBeat | None, beat: Beat) -> str:
    if thread is None:
        return "at work"
    step = f"step {beat.step}"
    detail = f" ({thread.detail})" if thread.detail else ""
    return {
        "start": f"in the start{detail}",
        "data": f"waiting for the data of {step}",
        "step": f"in {step}",
        "hook": f"in the hook {thread.detail} of {step}",
        "evaluation": f"in the evaluation after {step}{detail}",
        "save": f"saving the checkpoint of {thread.detail or step}",
        "end": f"in the end of the run{detail}",
    }[thread.phase]


def _stack(thread: ThreadBeat | None, *, of: int | None = None) -> str:
    if thread is None or not thread.stack:
        return ""
    whose = "Its stack" if of is None else f"The stack of rank {of}"
    text = f". {whose}: {' < '.join(thread.stack[:_FRAMES])}"
    if thread.helper_stack:
        text += f". The stack of the thread that it waits for: {' < '.join(thread.helper_stack[:_FRAMES])}"
    return text


def _why_silent(beat: Beat, host: str) -> str:
    """What the system says of a process that is silent, if it is on this machine."""
    if beat.host != host or not beat.born:
        return "is stopped, dead or cut off"
    is_same = (birth_of(beat.pid) or "").partition(" ")[0] == beat.born
    return why_silent(beat.pid) if is_same else "has ended"
