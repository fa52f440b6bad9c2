"""Tests of the split of layers: any number of layers over any number of positions."""

from itertools import product

import pytest

from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Placement, looped, v_shaped
from megatronish.parallel.schedules.split import SplitWeights, split_layers

PLACEMENTS = [
    *(looped(num_stages=stages, num_chunks=chunks) for stages in range(1, 6) for chunks in (1, 2, 3)),
    *(v_shaped(num_stages=stages) for stages in range(1, 6)),
]


def sizes(**arguments: object) -> list[int]:
    return [len(layers) for layers in split_layers(**arguments)]  # type: ignore[arg-type]


def of_stages(placement: Placement, parts: list[range]) -> list[int]:
    """Layers of each stage."""
    found = [0] * (1 + max(place.stage for place in placement))
    for place, part in zip(placement, parts, strict=True):
        found[place.stage] += len(part)
    return found


def test_every_layer_has_one_position_in_order_and_stages_differ_by_one_at_most() -> None:
    for placement, num_layers in product(PLACEMENTS, range(1, 33)):
        if num_layers >= len(placement):
            parts = split_layers(num_layers=num_layers, placement=placement)
            assert [layer for part in parts for layer in part] == list(range(num_layers))
            assert all(parts)
            stages = of_stages(placement, parts)
            assert max(stages) - min(stages) <= 1
            if num_layers % len(placement) == 0:
                assert {len(part) for part in parts} == {num_layers // len(placement)}


def test_layers_that_are_left_over_go_to_the_middle() -> None:
    assert sizes(num_layers=10, placement=looped(num_stages=4)) == [2, 3, 3, 2]
    assert sizes(num_layers=9, placement=looped(num_stages=4)) == [2, 3, 2, 2]
    assert sizes(num_layers=10, placement=looped(num_stages=4, num_chunks=2)) == [1, 1, 2, 1, 1, 2, 1, 1]
    assert sizes(num_layers=9, placement=v_shaped(num_stages=4)) == [1, 1, 1, 2, 1, 1, 1, 1]


def test_the_ends_take_what_they_are_told_over_their_chunks() -> None:
    stages = looped(num_stages=4)
    assert sizes(num_layers=12, placement=stages, first=2, last=1) == [2, 5, 4, 1]
    assert sizes(num_layers=12, placement=stages, first=6) == [6, 2, 2, 2]
    assert sizes(num_layers=5, placement=looped(num_stages=2), first=1, last=4) == [1, 4]
    loop, v = looped(num_stages=3, num_chunks=2), v_shaped(num_stages=3)
    assert sizes(num_layers=14, placement=loop, first=4, last=2) == [2, 4, 1, 2, 4, 1]
    assert sizes(num_layers=14, placement=v, first=4, last=2) == [2, 4, 1, 1, 4, 2]


def slowest(placement: Placement, stages: tuple[int, ...] | list[int], weights: SplitWeights) -> float:
    costs = list(map(float, stages))
    costs[placement[0].stage] += weights.embedding
    costs[placement[-1].stage] += weights.head
    return max(costs)


@pytest.mark.parametrize(
    "weights", [SplitWeights(0.0, 1.5), SplitWeights(0.001, 3.2), SplitWeights(2.5, 0.25), SplitWeights(1.0, 1.0)]
)
def test_no_split_has_a_faster_slowest_stage_than_the_automatic_one(weights: SplitWeights) -> None:
    for placement, num_layers in product(PLACEMENTS, range(2, 13)):
        num_stages = 1 + max(place.stage for place in placement)
        num_chunks = len(placement) // num_stages
        if num_layers >= len(placement) and num_stages < 5:
            parts = split_layers(num_layers=num_layers, placement=placement, weights=weights)
            counts = range(num_chunks, num_layers + 1)
            possible = [each for each in product(counts, repeat=num_stages) if sum(each) == num_layers]
            best = min(slowest(placement, each, weights) for each in possible)
            assert slowest(placement, of_stages(placement, parts), weights) == best


def test_the_automatic_split_makes_the_ends_light() -> None:
    weights = SplitWeights(embedding=0.001, head=2.0)
    assert sizes(num_layers=16, placement=looped(num_stages=4), weights=weights) == [4, 5, 5, 2]
    assert sizes(num_layers=16, placement=v_shaped(num_stages=4), weights=weights) == [1, 2, 3, 3, 2, 2, 2, 1]


IMPOSSIBLE = [
    ({"num_layers": 3, "placement": looped(num_stages=4)}, "num_layers=3 is less than .*=4, .*; use --pp 3 or fewer"),
    ({"num_layers": 7, "placement": v_shaped(num_stages=4)}, "num_layers=7 is less than .*=4 x 2 chunks.*--pp 3 or"),
    ({"num_layers": 2, "placement": looped(num_stages=2, num_chunks=3)}, "use fewer chunks"),
    ({"num_layers": 4, "placement": looped(num_stages=1), "first": 4}, "first_.*=4 needs pipeline.* > 1; add --pp 2"),
    ({"num_layers": 4, "placement": looped(num_stages=1), "last": 4}, "last_.*=4 needs pipeline.* > 1; add --pp 2"),
    ({"num_layers": 4, "placement": looped(num_stages=2), "first": 0}, "first_.*=0 must be at least 1"),
    (
        {"num_layers": 9, "placement": v_shaped(num_stages=2), "last": 1},
        "last.*=1 must be at least 2, a layer for each",
    ),
    (
        {"num_layers": 8, "placement": looped(num_stages=2), "first": 3, "last": 4},
        "first_pipeline_num_layers=3 and .*last_pipeline_num_layers=4 must add up to num_layers=8; change one by .1",
    ),
    (
        {"num_layers": 8, "placement": looped(num_stages=4), "first": 7},
        "first_pipeline_num_layers=7 leaves 1 of num_layers=8 to the other 3 stages, which need 3; use smaller",
    ),
    (
        {"num_layers": 8, "placement": looped(num_stages=3), "first": 4, "last": 5},
        "leave 0 of num_layers=8 to the other stage, which needs 1",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE)
def test_an_impossible_split_is_refused_with_the_remedy(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sizes(**arguments)
