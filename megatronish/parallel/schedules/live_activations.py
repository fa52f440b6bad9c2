"""Live activations of a pipeline stage: micro-batches that wait for a backward or for weight gradients, in a step.

Everything is counted from the plan of the schedule, so a schedule of a plug-in needs nothing more. Of a long step the
first three rounds are counted, which hold as much as all later ones, unless a schedule holds more with every
micro-batch, as GPipe does.
"""

from collections.abc import Hashable, Iterator
from functools import lru_cache
from operator import ge
from typing import NamedTuple, TypeVar

from megatronish.parallel.schedules.table import SCHEDULES

Held = TypeVar("Held")
ROUNDS = 3  # of as many micro-batches as there are stages
FEW_CHUNKS = 2  # of more chunks, those in the middle count as alike


class Instant(NamedTuple):
    """Micro-batches of each chunk that wait: `live` for their backward, `deferred` for their weight gradients alone."""

    live: tuple[int, ...]
    deferred: tuple[int, ...]


class Backward(NamedTuple):
    """A backward of a chunk begins at an instant; `begun` are the chunks that had one before."""

    instant: Instant
    chunk: int
    begun: frozenset[int]


class StagePlan(NamedTuple):
    """A stage of a schedule, and the sizes of a step."""

    schedule: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    stage: int


class StageLoad(NamedTuple):
    """What a pipeline stage holds: the layers of each of its chunks, and the plan of its step."""

    layers: tuple[range, ...]
    is_first: bool
    is_last: bool
    plan: StagePlan

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Layers of all its chunks, in the order of a forward."""
        return tuple(layer for chunk in self.layers for layer in chunk)

    @property
    def instants(self) -> frozenset[Instant]:
        """All instants of a step."""
        return _all_of(self.plan)[0]

    @property
    def backwards(self) -> frozenset[Backward]:
        """All backwards of a step."""
        return _all_of(self.plan)[1]


@lru_cache(maxsize=256)
def _all_of(plan: StagePlan) -> tuple[frozenset[Instant], frozenset[Backward]]:
    schedule, live, deferred = SCHEDULES[plan.schedule], [0] * plan.num_chunks, [0] * plan.num_chunks
    begun, now = frozenset[int](), Instant(tuple(live), tuple(deferred))
    instants, backwards = {now}, set[Backward]()
    for action in schedule.row(
        stage=plan.stage,
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        num_chunks=plan.num_chunks,
    ):
        if action.kind == "B":
            backwards.add(Backward(now, action.chunk, begun))
            begun |= {action.chunk}
        live[action.chunk] += (action.kind == "F") - (action.kind == "B")
        if schedule.has_weight_gradients:
            deferred[action.chunk] += (action.kind == "B") - (action.kind == "W")
        now = Instant(tuple(live), tuple(deferred))
        instants.add(now)
    return frozenset(instants), frozenset(backwards)


@lru_cache(maxsize=10_000)
def _grows(schedule: str, num_stages: int, num_chunks: int) -> bool:
    """Whether more micro-batches are live in a longer step, however long it is."""
    most = []
    for rounds in (ROUNDS, ROUNDS + 1):
        instants, _ = _all_of(StagePlan(schedule, num_stages, num_chunks, rounds * num_stages, 0))
        most.append(max(sum(instant.live) for instant in instants))
    return most[0] < most[1]


def _counted(plan: StagePlan) -> StagePlan:
    """The same stage in the shortest step that holds as much."""
    few = ROUNDS * plan.num_stages
    if plan.num_microbatches <= few or _grows(plan.schedule, plan.num_stages, plan.num_chunks):
        return plan
    return plan._replace(num_microbatches=few)


@lru_cache(maxsize=100_000)
def fullest_instants(plan: StagePlan) -> tuple[Instant, ...]:
    """Instants of which one holds most, whatever the sizes of the chunks; of many chunks the likely ones."""
    counted = _counted(plan)
    if counted != plan:
        return fullest_instants(counted)
    instants, _ = _all_of(plan)
    if plan.num_chunks > FEW_CHUNKS:  # those with most of all chunks, or one less, that differ at the model's ends
        most = max(sum(instant.live) for instant in instants)
        near = [instant for instant in sorted(instants) if sum(instant.live) >= most - 1]
        return tuple({(sum(instant.live), instant.live[0], instant.live[-1]): instant for instant in near}.values())
    return tuple(_largest({(*instant.live, *instant.deferred): instant for instant in sorted(instants)}))


@lru_cache(maxsize=100_000)
def fullest_backwards(plan: StagePlan) -> tuple[Backward, ...]:
    """Backwards of which one is the fullest moment of a step.

    In a long step it is one after every chunk had one; in a short one gradients come while activations are freed.
    """
    counted = _counted(plan)
    is_short = plan.num_microbatches < 2 * plan.num_stages or (
        counted == plan and _grows(plan.schedule, plan.num_stages, plan.num_chunks)
    )
    if counted != plan:
        return fullest_backwards(counted)
    _, backwards = _all_of(plan)
    ordered = sorted(backwards, key=lambda backward: (backward.instant, backward.chunk, sorted(backward.begun)))
    return tuple(_first(ordered, plan.num_chunks) if is_short else _later(ordered, plan.num_chunks))


def _later(backwards: list[Backward], num_chunks: int) -> Iterator[Backward]:
    """Those after every chunk had one, without those that hold no more than another one of the same chunk.

    Of many chunks those between the first and the last count as one: they differ in no more than their layers.
    """
    by_chunk: dict[int, dict[tuple[int, ...], Backward]] = {}
    is_many = num_chunks > FEW_CHUNKS
    for backward in backwards:
        if len(backward.begun) == num_chunks:
            (live, deferred), chunk = backward.instant, backward.chunk
            held = (sum(live), live[0], live[-1]) if is_many else (*live, *deferred)
            alike = min(chunk, 1) + (chunk == num_chunks - 1) if is_many else chunk
            by_chunk.setdefault(alike, {}).setdefault(held, backward)
    for alike_ones in by_chunk.values():
        yield from _largest(alike_ones)


def _first(backwards: list[Backward], num_chunks: int) -> Iterator[Backward]:
    """For each set of chunks that had a backward, those with most that is live, and most that waits at all."""
    fullest: dict[Hashable, tuple[int, Backward]] = {}
    is_many, few = num_chunks > FEW_CHUNKS, {0, 1, num_chunks // 4, num_chunks // 2, num_chunks - 1, num_chunks}
    for backward in backwards:
        (live, deferred), chunk = backward.instant, backward.chunk
        if is_many and len(backward.begun) not in few:
            continue
        for name, held in (("live", sum(live)), ("both", sum(live) + sum(deferred))):
            key = (name, backward.begun, (chunk == 0, chunk == num_chunks - 1) if is_many else chunk)
            if key not in fullest or held > fullest[key][0]:
                fullest[key] = held, backward
    yield from dict.fromkeys(backward for _, backward in fullest.values())


def _largest(candidates: dict[tuple[int, ...], Held]) -> Iterator[Held]:
    """Without those that hold no more than another one of any chunk."""
    largest: set[tuple[int, ...]] = set()
    # What holds as much of every chunk holds as much in all: only those before can be such another one.
    for held in sorted(candidates, key=sum, reverse=True):
        if not any(all(map(ge, other, held)) for other in largest):
            largest.add(held)
    return (candidate for held, candidate in candidates.items() if held in largest)
