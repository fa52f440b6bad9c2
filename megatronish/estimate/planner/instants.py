"""Instants of a schedule at which a stage may hold most: micro-batches in flight, and the backwards that begin then."""

from collections.abc import Iterator
from functools import lru_cache

from megatronish.estimate.costs.activations import Backward, Instant
from megatronish.parallel.schedules.table import SCHEDULES


@lru_cache(maxsize=100_000)
def in_flight(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Instant, ...]:
    """The instants of a step of which one holds most."""
    if schedule == "1f1b":
        return (Instant((min(stages - stage, microbatches),), (0,)),)
    if schedule == "gpipe":
        return (Instant((microbatches,), (0,)),)
    return _counted(schedule, stages, chunks, min(microbatches, 3 * stages), stage)


@lru_cache(maxsize=10_000)
def _counted(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Instant, ...]:
    """The same, counted from the plan; without instants that hold no more than another one in any respect."""
    live, deferred = [0] * chunks, [0] * chunks
    found = set()
    plan = SCHEDULES[schedule]
    for action in plan.row(stage=stage, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks):
        live[action.chunk] += (action.kind == "F") - (action.kind == "B")
        if plan.has_weight_gradients:
            deferred[action.chunk] += (action.kind == "B") - (action.kind == "W")
        if action.kind != "W":
            found.add(Instant(tuple(live), tuple(deferred)))
    if chunks > 2:  # of many chunks: those with most of them all, or one less, that differ at the ends of the model
        most = max(sum(each.live) for each in found)
        near = [each for each in found if sum(each.live) >= most - 1]
        return tuple({(sum(each.live), each.live[0], each.live[-1]): each for each in near}.values())
    flat = {(*each.live, *each.deferred): each for each in found}
    return tuple(
        each
        for one, each in flat.items()
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in flat)
    )


@lru_cache(maxsize=100_000)
def later_backwards(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Backward, ...]:
    """Backwards of a step of which one is the fullest moment, once every chunk has had one."""
    if schedule in ("1f1b", "gpipe"):
        (most,) = in_flight(schedule, stages, chunks, microbatches, stage)
        return (Backward(most, 0, frozenset({0})),)
    return _counted_backwards(schedule, stages, chunks, min(microbatches, 3 * stages), stage)


@lru_cache(maxsize=10_000)
def _counted_backwards(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Backward, ...]:
    """Backwards in a plan, without those of the same chunk when no more is held than in another one of them.

    Of many chunks those between the first and the last count as one: they differ in no more than their layers.
    """
    found: dict[int, dict[tuple[int, ...], Backward]] = {}
    all_of = frozenset(range(chunks))
    for live, deferred, chunk in _begins(schedule, stages, chunks, microbatches, stage):
        held = (sum(live), live[0], live[-1]) if chunks > 2 else (*live, *deferred)
        alike = min(chunk, 1) + (chunk == chunks - 1) if chunks > 2 else chunk
        found.setdefault(alike, {}).setdefault(held, Backward(Instant(live, deferred), chunk, all_of))
    return tuple(
        each
        for backwards in found.values()
        for held, each in backwards.items()
        if not any(more != held and all(a >= b for a, b in zip(more, held, strict=True)) for more in backwards)
    )


def _begins(
    schedule: str, stages: int, chunks: int, microbatches: int, stage: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """All backwards of a plan: what is live and what is deferred as each begins, and its chunk."""
    live, deferred = [0] * chunks, [0] * chunks
    plan = SCHEDULES[schedule]
    for action in plan.row(stage=stage, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks):
        if action.kind == "B":
            yield tuple(live), tuple(deferred), action.chunk
        live[action.chunk] += (action.kind == "F") - (action.kind == "B")
        if plan.has_weight_gradients:
            deferred[action.chunk] += (action.kind == "B") - (action.kind == "W")


@lru_cache(maxsize=100_000)
def first_backwards(schedule: str, stages: int, chunks: int, microbatches: int, stage: int) -> tuple[Backward, ...]:
    """The same of a step of few micro-batches, in which gradients come while activations are given back."""
    none: frozenset[int] = frozenset()
    if schedule in ("1f1b", "gpipe"):
        most = stages - stage if schedule == "1f1b" else microbatches
        first = Backward(Instant((min(most, microbatches),), (0,)), 0, none)
        return (first, Backward(Instant((min(most, microbatches - 1),), (0,)), 0, frozenset({0})))[:microbatches]
    begun, found = none, dict[tuple[object, ...], tuple[int, Backward]]()
    for live, deferred, chunk in _begins(schedule, stages, chunks, microbatches, stage):
        each = Backward(Instant(live, deferred), chunk, begun)
        for name, held in (("live", sum(live)), ("both", sum(live) + sum(deferred))):
            alike = (chunk == 0, chunk == chunks - 1) if chunks > 2 else chunk
            key = (name, begun, alike)
            if key not in found or held > found[key][0]:
                found[key] = held, each
        begun |= {chunk}
    kept = dict.fromkeys(each for _, each in found.values())
    few = {0, 1, chunks // 4, chunks // 2, chunks - 1, chunks}
    return tuple(each for each in kept if chunks <= 2 or len(each.begun) in few)
