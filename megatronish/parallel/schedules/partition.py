"""Partition of layers with unequal costs into contiguous runs, one for each position of a pipeline.

The objective is the cost of the slowest stage; among equal ones, the smallest sum of squares of the stages' costs, then
of the chunks' costs. With one chunk a stage, a dynamic program over (position, layers so far) finds the optimum. With
several chunks, a stage's cost is the sum over separate runs, so an optimum is not composed of optimal parts. Then a
local search moves single layers between positions, and a depth-first branch-and-bound search looks for a faster
partition: it ends at the optimum, or after MOST_VISITS partial partitions.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

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
        before = list(accumulate(self.layers, initial=0.0))
        runs = pairwise(accumulate(sizes, initial=0))
        costs = [end + before[stop] - before[start] for end, (start, stop) in zip(self.ends, runs, strict=True)]
        stages = [sum(costs[position] for position in positions) for positions in self.stages]
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
                found = (max(slowest, cost), squares + cost**2, (*sizes, stop - start))
                longer[stop] = min(longer.get(stop, found), found)
        best = longer
    return list(best[num_layers][2])


def _stops(pipeline: PipelineCosts, position: int, start: int) -> range:
    """Possible ends of a position's run that starts at layer `start`: every later position needs a layer."""
    after = range(position + 1, len(pipeline.ends))
    most = len(pipeline.layers) - sum(pipeline.fixed.get(each, 1) for each in after)
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
