"""Sentences for ranks that hang: the rank, what it has not entered, for how long, and where it is instead."""

from collections.abc import Sequence

from megatronish.core.layout import Layout
from megatronish.launch.stopped import why_silent
from megatronish.watch.hang_diagnosis import Culprit, RanksSeen
from megatronish.watch.heartbeat import Beat, Collective, ThreadBeat
from megatronish.watch.observer import MAIN, birth_of

_FRAMES = 5
_MOST = 4  # culprits that are described, of which there can be a whole machine


class RankWords:
    """Sentences about the ranks of a layout, written by the process of host `host`."""

    def __init__(self, layout: Layout, *, host: str) -> None:
        self.layout, self.host = layout, host

    def rank(self, rank: int) -> str:
        """rank 13 (tp 1, pp 3, dp 0): sizes of one are left out."""
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
            if any((each.number, each.kind) == (usual.number, usual.kind) for each in beat.recent.get(usual.line, []))
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
        ranks = ", ".join(self.rank(each.rank) for each in culprits[:_MOST])
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
