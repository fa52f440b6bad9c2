"""Tests of the partition of layers with unequal costs: the slowest stage is as fast as possible."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from megatronish.parallel.schedules.plan import Placement, looped, v_shaped
from megatronish.parallel.schedules.split import SplitWeights, split_layers

PLACEMENTS = {
    "3 stages": looped(num_stages=3),
    "2 stages of 2 chunks": looped(num_stages=2, num_chunks=2),
    "3 stages of 2 chunks": looped(num_stages=3, num_chunks=2),
    "a v of 3 stages": v_shaped(num_stages=3),
}


def patterns(num_layers: int) -> Iterator[tuple[float, ...]]:
    """Costs: every second, third or sixth layer another one, dear ones at an end, and all different."""
    for period, cost in ((2, 1.7), (3, 3.0), (6, 0.4)):
        yield tuple(cost if layer % period == 0 else 1.0 for layer in range(num_layers))
    yield tuple(3.0 if layer < 3 else 1.0 for layer in range(num_layers))
    yield tuple(1.0 + layer * 7 % 5 / 4 for layer in range(num_layers))


def slowest(placement: Placement, cuts: list[int], weights: SplitWeights, given: tuple[int, ...] = ()) -> float:
    costs = [0.0] * (1 + max(place.stage for place in placement))
    for place, (start, stop) in zip(placement, pairwise(cuts), strict=True):
        costs[place.stage] += sum(weights.layers[start:stop])
    costs[placement[0].stage] += weights.embedding
    costs[placement[-1].stage] += weights.head
    return max(cost for stage, cost in enumerate(costs) if stage not in given)


def cuts_of(parts: list[range]) -> list[int]:
    return [0, *(part.stop for part in parts)]


@pytest.mark.parametrize("head", [0.0, 2.5])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_cut_has_a_faster_slowest_stage(name: str, head: float) -> None:
    placement = PLACEMENTS[name]
    for num_layers in (len(placement) + 1, 12):
        for layers in patterns(num_layers):
            weights = SplitWeights(0.01, head, layers)
            parts = split_layers(num_layers=num_layers, placement=placement, weights=weights)
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            possible = combinations(range(1, num_layers), len(placement) - 1)
            best = min(slowest(placement, [0, *cuts, num_layers], weights) for cuts in possible)
            assert slowest(placement, cuts_of(parts), weights) == pytest.approx(best)


def test_a_stage_that_is_given_holds_what_it_is_given_and_the_others_are_cut_best() -> None:
    placement, weights = looped(num_stages=4), SplitWeights(0.0, 1.0, (1.0, 1.0, 1.0, 4.0) * 4)
    parts = split_layers(num_layers=16, placement=placement, first=6, last=2, weights=weights)
    assert [len(part) for part in parts] == [6, 4, 4, 2]
    given = (0, 3)
    best = min(slowest(placement, [0, 6, cut, 14, 16], weights, given) for cut in range(7, 14))
    assert slowest(placement, cuts_of(parts), weights, given) == best


@pytest.mark.parametrize("unit", [1.0, 0.1, 7.3])
def test_layers_of_one_cost_are_dealt_as_if_none_had_a_cost(unit: float) -> None:
    for placement in PLACEMENTS.values():
        for num_layers in range(len(placement), 20):
            weights = SplitWeights(0.001 * unit, 2.0 * unit, (unit,) * num_layers)
            assert split_layers(num_layers=num_layers, placement=placement, weights=weights) == split_layers(
                num_layers=num_layers, placement=placement, weights=SplitWeights(0.001, 2.0)
            )


def test_many_layers_in_many_chunks_are_cut_well_in_little_time() -> None:
    layers = tuple(1.0 if layer % 6 == 5 else 0.8 for layer in range(96))
    weights, placement = SplitWeights(0.001, 2.0, layers), looped(num_stages=8, num_chunks=4)
    parts = split_layers(num_layers=96, placement=placement, weights=weights)
    even = (sum(layers) + 2.001) / 8
    assert slowest(placement, cuts_of(parts), weights) < 1.02 * even
