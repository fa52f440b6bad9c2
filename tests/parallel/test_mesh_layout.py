"""Tests of the grid of ranks: every layout of up to 24 ranks."""

from itertools import combinations, product
from math import prod

import pytest

from megatronish.core.layout import AXES, Coordinates, Layout, ranks_of_a_token

LAYOUTS = [Layout(*sizes) for sizes in product(range(1, 25), repeat=4) if prod(sizes) <= 24]
AXIS_SETS = [axes for count in range(5) for axes in combinations(AXES, count)]


def test_rank_and_coordinates_are_inverse() -> None:
    for layout in LAYOUTS:
        places = [layout.coordinates(rank) for rank in range(layout.world_size)]
        assert len(set(places)) == layout.world_size == prod(layout.sizes)
        assert [layout.rank(**place._asdict()) for place in places] == list(range(layout.world_size))
        for place in places:
            assert all(0 <= coordinate < size for coordinate, size in zip(place, layout.sizes, strict=True))


def test_tp_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    layout = Layout(pp=2, dp=2, cp=2, tp=2)
    assert layout.rank(tp=1) == 1
    assert layout.rank(cp=1) == 2
    assert layout.rank(dp=1) == 4
    assert layout.rank(pp=1) == 8
    assert layout.coordinates(13) == Coordinates(pp=1, dp=1, cp=0, tp=1)


def test_groups_of_any_axes_hold_every_rank_once() -> None:
    for layout, axes in product(LAYOUTS, AXIS_SETS):
        groups = layout.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {prod(getattr(layout, axis) for axis in axes)}


def test_ranks_of_a_group_differ_on_its_axes_alone_and_rise() -> None:
    for layout, axes in product(LAYOUTS, AXIS_SETS):
        for group in layout.groups(*axes):
            assert group == sorted(group)
            places = [layout.coordinates(rank) for rank in group]
            for axis in set(AXES) - set(axes):
                assert len({getattr(place, axis) for place in places}) == 1


def test_groups_are_megatrons() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Layout(dp=2, cp=2, tp=2).groups("dp", "cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_order_in_which_axes_are_named_does_not_matter() -> None:
    layout = Layout(pp=2, dp=3, cp=2, tp=2)
    assert layout.groups("dp", "cp") == layout.groups("cp", "dp")


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_a_rank_outside_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} is outside this layout of 8 ranks"):
        Layout(pp=2, dp=2, tp=2).coordinates(rank)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_without_ranks_is_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"{axis}=0 must be at least 1"):
        Layout(**{axis: 0})


def test_a_layout_names_its_axes() -> None:
    assert str(Layout(pp=2, dp=3, tp=4)) == "dp 3 x tp 4 x pp 2"
    assert str(Layout(cp=2)) == "dp 1 x tp 1 x pp 1 x cp 2"


@pytest.mark.parametrize(("num_experts", "num_chosen", "ep"), [(8, 2, 4), (8, 3, 2), (6, 1, 3), (4, 4, 2)])
def test_ranks_of_a_token_are_the_mean_over_all_choices(num_experts: int, num_chosen: int, ep: int) -> None:
    ranks = [
        len({expert // (num_experts // ep) for expert in chosen})
        for chosen in combinations(range(num_experts), num_chosen)
    ]
    expected = ranks_of_a_token(num_chosen=num_chosen, num_experts=num_experts, ep=ep)
    assert expected == pytest.approx(sum(ranks) / len(ranks), rel=1e-12)
