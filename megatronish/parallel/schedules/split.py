"""Split of the layers over the positions of a pipeline, so that the slowest stage is as fast as possible.

Layers of equal cost are assigned greedily, one at a time, to the stage with the least cost so far, then a stage's
layers to its chunks in the same way. This is optimal, and gives equal parts where possible. Among stages of equal cost,
one in the middle of the model gets the layer, because the ends also hold the embedding and the head.

Layers of unequal costs are split by `cut_into_runs`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Placement

# Partition of layers with unequal costs into contiguous runs, one for each position of a pipeline.
#
# The objective is the cost of the slowest stage; among equal ones, the smallest sum of squares of the stages' costs,
# then of the chunks' costs. With one chunk a stage, a dynamic program over (position, layers so far) finds the optimum.
# With several chunks, a stage's cost is the sum over separate runs, so an optimum is not composed of optimal parts.
# Then a local search moves single layers between positions, and a depth-first branch-and-bound search looks for a
# faster partition: it ends at the optimum, or after MOST_VISITS partial partitions.


MOST_VISITS = 20_000
"""Limit of the branch-and-bound search, in partial partitions: about a tenth of a second."""

Slowness = tuple[float, float, float]


class PipelineCosts(NamedTuple):
    """Costs of layers and positions, and the positions of each stage.

    `ends` has for each position its cost besides layers (embedding, head). `stages` has the positions of the compared
    stages; `fixed` has the positions of the other stages, with their given numbers of layers.
    """

    layers: Sequence[float]
    ends: Sequence[float]
    stages: Sequence[Sequence[int]]
    fixed: dict[int, int]

    def slowness(self, sizes: Sequence[int]) -> Slowness:
        """Cost of the slowest stage, sum of squares of stages' costs and of chunks' costs, rounded to nine digits."""
        # Prefix sums: the cost of layers [start, stop) is before[stop] - before[start].
        before = list(accumulate(self.layers, initial=0.0))
        runs = pairwise(accumulate(sizes, initial=0))
        costs = [end + before[stop] - before[start] for end, (start, stop) in zip(self.ends, runs, strict=True)]
        stages = [sum(costs[position] for position in positions) for positions in self.stages]
        # Rounded, so that sums of equal costs in another order compare as equal and the search ends.
        squares = (round(sum(cost**2 for cost in parts), 9) for parts in (stages, costs))
        return round(max(stages), 9), next(squares), next(squares)


def cut_into_runs(pipeline: PipelineCosts, even: list[int]) -> list[int]:
    """Number of layers of each position. `even` is a partition by numbers of layers, a second start of the search."""
    # 1. The optimum for the slowest position; with one chunk a stage, that is the optimum for stages.
    best = _contiguous(pipeline)
    if all(len(positions) == 1 for positions in pipeline.stages):
        return best
    # 2. Several chunks: local search from two starts, branch and bound from the better result, and local search again,
    #    which improves the sums of squares.
    exchanged = min((_exchanged(pipeline, start) for start in (best, even)), key=pipeline.slowness)
    return _exchanged(pipeline, _Search(pipeline, exchanged).run())


def _contiguous(pipeline: PipelineCosts) -> list[int]:
    """Sizes that minimise the cost of the most expensive position that is not fixed, then the sum of squares."""
    num_layers, num_positions = len(pipeline.layers), len(pipeline.ends)
    before = list(accumulate(pipeline.layers, initial=0.0))
    # 1. State: for each number of layers in the positions so far, the best (cost of the most expensive position, sum of
    #    squares, sizes). Tuples compare in this order.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    # 2. Transition: every state is extended by every possible run [start, stop) of the next position.
    for position in range(num_positions):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, sizes) in best.items():
            for stop in _stops(pipeline, position, start):
                is_fixed = position in pipeline.fixed
                cost = 0.0 if is_fixed else pipeline.ends[position] + before[stop] - before[start]
                candidate = (max(slowest, cost), squares + cost**2, (*sizes, stop - start))
                longer[stop] = min(longer.get(stop, candidate), candidate)
        best = longer
    return list(best[num_layers][2])


def _stops(pipeline: PipelineCosts, position: int, start: int) -> range:
    """Possible ends of a position's run that starts at layer `start`: every later position needs a layer."""
    # The last position takes all that is left; a position of a fixed stage has no choice, and may leave too few layers
    # for later ones: then the range is empty.
    after = range(position + 1, len(pipeline.ends))
    most = len(pipeline.layers) - sum(pipeline.fixed.get(later, 1) for later in after)
    if position in pipeline.fixed:
        stop = start + pipeline.fixed[position]
        return range(stop, min(stop, most) + 1)
    if not after:
        return range(most, most + 1)
    return range(start + 1, most + 1)


def _exchanged(pipeline: PipelineCosts, sizes: list[int]) -> list[int]:
    """Local search: move a layer from one position to another as long as the partition gets faster."""
    positions = [position for stage in pipeline.stages for position in stage]
    least, goes_on = pipeline.slowness(sizes), True
    while goes_on:
        goes_on = False
        # Layers are contiguous: a move shifts all boundaries between the two positions by one layer.
        for giver, taker in permutations(positions, 2):
            if sizes[giver] == 1:
                continue
            tried = list(sizes)
            tried[giver] -= 1
            tried[taker] += 1
            slowness = pipeline.slowness(tried)
            if slowness < least:
                sizes, least, goes_on = tried, slowness, True
    return sizes


class _Search:
    """Branch-and-bound search, position by position, for a partition whose slowest stage is faster than in `best`."""

    def __init__(self, pipeline: PipelineCosts, best: list[int]) -> None:
        self.pipeline, self.best, self.least = pipeline, best, pipeline.slowness(best)[0]
        self.before = list(accumulate(pipeline.layers, initial=0.0))
        self.stage_of = {position: n for n, stage in enumerate(pipeline.stages) for position in stage}
        # Lower bound of a stage's cost: the costs of its ends, counted from the start, and of its layers so far.
        self.loads = [sum(pipeline.ends[position] for position in stage) for stage in pipeline.stages]
        self.sizes: list[int] = []
        self.visits = 0

    def run(self) -> list[int]:
        """The best partition that was found."""
        self._visit(0)
        return self.best

    def _visit(self, start: int) -> None:
        """Extend the partial partition `sizes`, which ends at layer `start`, by all runs of the next position."""
        position = len(self.sizes)
        self.visits += 1
        # 1. A leaf: every bound was passed, so it is faster than the best one so far.
        if position == len(self.pipeline.ends):
            self.best, self.least = list(self.sizes), max(self.loads)
            return
        stage = self.stage_of.get(position)
        # 2. Branch over the end of the run, shortest first; a stage that is fixed costs nothing in the comparison.
        for stop in _stops(self.pipeline, position, start):
            cost = 0.0 if stage is None else self.before[stop] - self.before[start]
            if stage is not None and self.loads[stage] + cost > self.least - 1e-9:
                return  # bound: no faster, and neither is any longer run
            if self.visits >= MOST_VISITS:
                return
            # 3. Descend, and undo the step afterwards.
            self.sizes.append(stop - start)
            if stage is not None:
                self.loads[stage] += cost
            self._visit(stop)
            if stage is not None:
                self.loads[stage] -= cost
            self.sizes.pop()


FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


class SplitWeights(NamedTuple):
    """Costs of the embedding, of the head and of each layer, in one unit; without `layers` each of them costs 1."""

    embedding: float = 0.0
    head: float = 0.0
    layers: tuple[float, ...] = ()

    @property
    def are_alike(self) -> bool:
        """Whether all layers have the same cost."""
        return len(set(self.layers)) < 2

    def in_layers(self) -> "SplitWeights":
        """Costs of embedding and head in units of a layer, if all layers have the same cost."""
        unit = self.layers[0] if self.layers else 1.0
        return SplitWeights(self.embedding / unit, self.head / unit)


def split_layers(
    *,
    num_layers: int,
    placement: Placement,
    first: int | None = None,
    last: int | None = None,
    weights: SplitWeights | None = None,
) -> list[range]:
    """The layers of every position, first position first; UserError if a position would have none.

    `first` and `last` are the numbers of layers of the first and of the last pipeline stage, all chunks together; a
    stage with a given number is left out of the comparison. Without `weights` every layer costs the same, and embedding
    and head cost nothing.
    """
    stages, weights = _positions_of_stages(placement), weights or SplitWeights()
    sizes_asked = {"num_layers": num_layers, "num_stages": len(stages), "num_chunks": len(stages[0])}
    if problem := stages_problem(**sizes_asked, first=first, last=last):
        raise UserError(problem)
    given = {stage: layers for stage, layers in ((0, first), (len(stages) - 1, last)) if layers is not None}
    if weights.are_alike:
        sizes = _by_counts(num_layers, stages, given, weights.in_layers())
    else:
        assert len(weights.layers) == num_layers, "a cost for each layer"
        sizes = _by_costs(stages, given, weights)
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def _by_counts(
    num_layers: int, stages: Sequence[Sequence[int]], given: dict[int, int], weights: SplitWeights
) -> list[int]:
    """Layers of each position, where all layers cost the same; `weights` of the ends are in units of a layer."""
    # 1. How far each position is from the ends of the model: between equal costs the middle gets the layer.
    num_positions = sum(map(len, stages))
    extra = _ends(num_positions, weights)
    inward = [min(position, num_positions - 1 - position) for position in range(num_positions)]
    # 2. Over the stages without a given number, then over the chunks of each stage.
    free = [stage for stage in range(len(stages)) if stage not in given]
    dealt = _deal(
        num_layers - sum(given.values()),
        extra=[sum(extra[position] for position in stages[stage]) for stage in free],
        inward=[min(inward[position] for position in stages[stage]) for stage in free],
        at_least=len(stages[0]),
    )
    sizes = [0] * num_positions
    for stage, size in {**given, **dict(zip(free, dealt, strict=True))}.items():
        positions = stages[stage]
        parts = _deal(size, extra=[extra[i] for i in positions], inward=[inward[i] for i in positions], at_least=1)
        for position, part in zip(positions, parts, strict=True):
            sizes[position] = part
    return sizes


def _by_costs(stages: list[list[int]], given: dict[int, int], weights: SplitWeights) -> list[int]:
    """Layers of each position, where layers cost differently."""
    # What a given stage holds in each of its chunks does not depend on costs.
    even = _by_counts(len(weights.layers), stages, given, SplitWeights())
    pipeline = PipelineCosts(
        layers=weights.layers,
        ends=_ends(len(even), weights),
        stages=[positions for stage, positions in enumerate(stages) if stage not in given],
        fixed={position: even[position] for stage in given for position in stages[stage]},
    )
    return cut_into_runs(pipeline, even)


def stages_problem(
    *, num_layers: int, num_stages: int, num_chunks: int, first: int | None, last: int | None
) -> str | None:
    """The problem as a sentence, or None: every chunk of every stage needs a layer, given `first` and `last`."""
    chunks = f" x {num_chunks} chunks" if num_chunks > 1 else ""
    if num_layers < num_stages * num_chunks:
        most = num_layers // num_chunks
        remedy = f"use --pp {most} or fewer, or more layers" if most else "use fewer chunks a stage, or more layers"
        return (
            f"num_layers={num_layers} is less than pipeline_model_parallel_size={num_stages}{chunks}, and each of them "
            f"needs a layer; {remedy}"
        )
    given = {name: layers for name, layers in ((FIRST, first), (LAST, last)) if layers is not None}
    for name, layers in given.items():
        if num_stages == 1:
            return f"{name}={layers} needs pipeline_model_parallel_size > 1; add --pp 2, or leave it out"
        if layers < num_chunks:
            return f"{name}={layers} must be at least {num_chunks}, a layer for each chunk of the stage; use more"
    left, others = num_layers - sum(given.values()), num_stages - len(given)
    phrase = " and ".join(f"{name}={layers}" for name, layers in given.items())
    if others == 0 and left:
        return f"{phrase} must add up to num_layers={num_layers}; change one by {left:+d}, or leave one out"
    if left < others * num_chunks:
        stages = "stage, which needs" if others == 1 else f"{others} stages, which need"
        return (
            f"{phrase} leave{'s' if len(given) == 1 else ''} {max(left, 0)} of num_layers={num_layers} to the other "
            f"{stages} {others * num_chunks}; use smaller ones"
        )
    return None


def _deal(num_layers: int, *, extra: Sequence[float], inward: Sequence[int], at_least: int) -> list[int]:
    """Numbers of layers, assigned greedily: each to the least cost so far, then farthest from the model's ends."""
    sizes = [at_least] * len(extra)
    for _ in range(num_layers - at_least * len(sizes)):
        sizes[min(range(len(sizes)), key=lambda i: (extra[i] + sizes[i], -inward[i], i))] += 1
    return sizes


def _positions_of_stages(placement: Placement) -> list[list[int]]:
    """The positions of each stage, first chunk first."""
    stages: list[list[int]] = [[] for _ in range(1 + max(place.stage for place in placement))]
    for position, place in enumerate(placement):
        stages[place.stage].append(position)
    return stages


def _ends(num_positions: int, weights: SplitWeights) -> list[float]:
    """What each position costs besides its layers."""
    costs = [0.0] * num_positions
    costs[0] += weights.embedding
    costs[-1] += weights.head
    return costs
