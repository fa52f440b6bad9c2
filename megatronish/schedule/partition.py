"""Partition of layers that cost differently into runs, one for each position of a pipeline.

What counts is the slowest stage; of equally slow cuts the one whose stages, then chunks, differ less. With one chunk a
stage a dynamic program over (position, layers so far) finds the best cut. With several chunks a stage costs the sum of
runs that lie apart, and the best cut cannot be composed of best parts. Exchanges of single layers between positions
then make a good cut, and a search in depth, which leaves out what is no faster, looks for a faster one: it ends at the
best cut, or after MOST_VISITS.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple

MOST_VISITS = 20_000
"""Partial cuts that the search looks at: a tenth of a second."""

Slowness = tuple[float, float, float]


class PipelineCosts(NamedTuple):
    """Costs of layers and of the model's ends, and the positions of each stage.

    `ends` are what positions cost besides layers. `stages` are those that are compared: the positions of the others,
    whose numbers of layers are given, are `fixed`.
    """

    layers: Sequence[float]
    ends: Sequence[float]
    stages: Sequence[Sequence[int]]
    fixed: dict[int, int]

    def slowness(self, sizes: Sequence[int]) -> Slowness:
        """Cost of the slowest stage, then the squares of the costs of stages and of chunks, to nine digits."""
        before = list(accumulate(self.layers, initial=0.0))
        runs = pairwise(accumulate(sizes, initial=0))
        costs = [end + before[stop] - before[start] for end, (start, stop) in zip(self.ends, runs, strict=True)]
        stages = [sum(costs[position] for position in positions) for positions in self.stages]
        squares = (round(sum(cost**2 for cost in parts), 9) for parts in (stages, costs))
        return round(max(stages), 9), next(squares), next(squares)


def cut_into_runs(pipeline: PipelineCosts, even: list[int]) -> list[int]:
    """Layers of each position; `even` is a cut to start from, by numbers of layers."""
    best = _contiguous(pipeline)
    if all(len(positions) == 1 for positions in pipeline.stages):
        return best
    exchanged = min((_exchanged(pipeline, start) for start in (best, even)), key=pipeline.slowness)
    return _exchanged(pipeline, _Search(pipeline, exchanged).run())


def _contiguous(pipeline: PipelineCosts) -> list[int]:
    """Sizes with the least cost of the dearest position that is not fixed; of those with few squares of costs."""
    num_layers, num_positions = len(pipeline.layers), len(pipeline.ends)
    before = list(accumulate(pipeline.layers, initial=0.0))
    # Of each number of layers that the positions so far may hold: (dearest position, sum of squares, sizes).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for position in range(num_positions):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (dearest, squares, sizes) in best.items():
            for stop in _stops(pipeline, position, start):
                is_fixed = position in pipeline.fixed
                cost = 0.0 if is_fixed else pipeline.ends[position] + before[stop] - before[start]
                found = (max(dearest, cost), squares + cost**2, (*sizes, stop - start))
                longer[stop] = min(longer.get(stop, found), found)
        best = longer
    return list(best[num_layers][2])


def _stops(pipeline: PipelineCosts, position: int, start: int) -> range:
    """Where the run of a position may stop that starts at a layer: the positions after it need a layer each."""
    after = range(position + 1, len(pipeline.ends))
    most = len(pipeline.layers) - sum(pipeline.fixed.get(each, 1) for each in after)
    if position in pipeline.fixed:
        stop = start + pipeline.fixed[position]
        return range(stop, min(stop, most) + 1)
    if not after:
        return range(most, most + 1)
    return range(start + 1, most + 1)


def _exchanged(pipeline: PipelineCosts, sizes: list[int]) -> list[int]:
    """Sizes after every exchange of a layer between two positions that makes them less slow."""
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
    """Search in depth, position after position, for a cut whose slowest stage is faster than that of `best`."""

    def __init__(self, pipeline: PipelineCosts, best: list[int]) -> None:
        self.pipeline, self.best, self.least = pipeline, best, pipeline.slowness(best)[0]
        self.before = list(accumulate(pipeline.layers, initial=0.0))
        self.stage_of = {position: n for n, stage in enumerate(pipeline.stages) for position in stage}
        # What a stage still has to carry of the ends counts from the start.
        self.loads = [sum(pipeline.ends[position] for position in stage) for stage in pipeline.stages]
        self.sizes: list[int] = []
        self.visits = 0

    def run(self) -> list[int]:
        """The best cut that was seen."""
        self._visit(0)
        return self.best

    def _visit(self, start: int) -> None:
        position = len(self.sizes)
        self.visits += 1
        if position == len(self.pipeline.ends):
            self.best, self.least = list(self.sizes), max(self.loads)
            return
        stage = self.stage_of.get(position)
        for stop in _stops(self.pipeline, position, start):
            cost = 0.0 if stage is None else self.before[stop] - self.before[start]
            if stage is not None and self.loads[stage] + cost > self.least - 1e-9:
                return  # so would every longer run be
            if self.visits >= MOST_VISITS:
                return
            self.sizes.append(stop - start)
            if stage is not None:
                self.loads[stage] += cost
            self._visit(stop)
            if stage is not None:
                self.loads[stage] -= cost
            self.sizes.pop()
