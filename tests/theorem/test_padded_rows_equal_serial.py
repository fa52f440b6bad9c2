"""Theorem for rows of experts in rooms: ranks that send each other fixed numbers of rows, and one process, are equal.

A step whose rows find no room is computed again, so what is compared is the same either way; which of both it was is
what the metric says.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from comparison import aspects_that_differ, assert_same_training, serial
from problem import Spread
from ranks import RankError, run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train, problem_with
from theorem import Record
from torch import Tensor

from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.engine.balancing import Balancing
from megatronish.layers import dispatch
from megatronish.layers.dispatch import RouteSizes, TokenRoute, make_route
from megatronish.model import experts as experts_of_model

WITHOUT_ROOM = "rows_without_room"
DP2, DP4 = Spread(Layout(dp=2), 2, ep=2, etp=1), Spread(Layout(dp=4), 1, ep=4, etp=1)
TP2 = Spread(Layout(tp=2), 2, ep=2, etp=1, sequence_parallel=True)
FULL = RecomputeConfig("full", "uniform", 1)
# Of two chosen experts as many as both are on one rank: twice the mean of two ranks, four times that of four, is room
# for all.
CASES: dict[str, tuple[str, Spread]] = {
    "ep 2": ("softmax", replace(DP2, room=2.0)),
    "ep 4": ("softmax", replace(DP4, room=4.0)),
    "ep over tp": ("softmax", replace(TP2, room=2.0)),
    "ep over tp, whole sequences": ("softmax", replace(TP2, room=2.0, sequence_parallel=False)),
    "ep and etp": ("softmax", Spread(Layout(dp=2, tp=2), 2, ep=2, etp=2, room=2.0)),
    "ep over cp, all computed again": ("softmax", Spread(Layout(cp=2), 4, ep=2, etp=1, room=2.0, recompute=FULL)),
    "stages": ("softmax", Spread(Layout(dp=2, pp=2), 1, ep=2, etp=1, room=2.0, schedule="zb-h1")),
    "shared experts, biases of routers": ("sigmoid", replace(DP4, ep=2, room=2.0, zero=1)),
    "ZeRO-2": ("softmax", replace(DP4, ep=2, room=2.0, zero=2)),
    "ZeRO-3": ("softmax", replace(DP4, ep=2, room=2.0, zero=3)),
    "capacity": ("capacity", replace(DP2, pads=True)),
    "capacity, ep over tp": ("capacity", replace(TP2, pads=True)),
    "capacity, ep over cp": ("capacity", Spread(Layout(cp=2), 4, ep=2, etp=1, pads=True)),
    "capacity, ep and etp, stages": ("capacity", Spread(Layout(tp=2, pp=2), 1, ep=1, etp=2, pads=True)),
    "capacity and a factor": ("capacity", replace(DP4, pads=True, room=4.0)),
}
WITH_REPEATED_STEPS: dict[str, tuple[str, Spread]] = {
    "ep 2": ("softmax", replace(DP2, room=1.0)),
    "ep 4": ("softmax", replace(DP4, room=1.0)),
    "stages": ("softmax", Spread(Layout(dp=2, pp=2), 1, ep=2, etp=1, room=1.0)),
    "biases of routers, ZeRO-2": ("sigmoid", replace(DP2, room=1.0, zero=2)),
    "ZeRO-3": ("softmax", replace(DP2, room=1.0, zero=3)),
    "offloaded states": ("softmax", replace(DP2, room=1.0, zero=1, offload="optimizer")),
    "capacity, ep over tp": ("capacity", replace(TP2, room=1.0)),
}


def trained(kind: str, spread: Spread, plant: Callable[[Patch], None] = no_mistake) -> tuple[list[Record], list[float]]:
    """What the ranks saw, and of each step how many rows found no room."""
    ranks = run_ranks(spread.layout.world_size, planted_train, problem_with(kind), spread, plant)
    without = [metrics.get(WITHOUT_ROOM, 0.0) for metrics in ranks[0].metrics]
    return [without_metric(record) for record in ranks], without


def without_metric(record: Record) -> Record:
    """The record without the number of rows that found no room."""
    return record._replace(
        metrics=[{name: value for name, value in each.items() if name != WITHOUT_ROOM} for each in record.metrics]
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_in_rooms_train_the_model_of_one_process(name: str) -> None:
    kind, spread = CASES[name]
    ranks, without = trained(kind, spread)
    assert_same_training(ranks, serial(problem_with(kind)))
    assert not any(without)


@pytest.mark.parametrize("name", WITH_REPEATED_STEPS)
def test_a_step_without_room_is_computed_again(name: str) -> None:
    kind, spread = WITH_REPEATED_STEPS[name]
    ranks, without = trained(kind, spread)
    assert any(without), "the room was for all rows"
    assert_same_training(ranks, serial(problem_with(kind)))


def step_not_computed_again(patch: Patch) -> None:
    """Rows without room are lost."""
    patch.setattr(Balancing, "lacked_room", lambda *_: False)


def padding_in_the_last_group(patch: Patch) -> None:
    """Rows that are no choice's are multiplied with the last expert."""

    def planted(*args: Any, **options: Any) -> TokenRoute:
        route = make_route(*args, **options)
        ends = route.groups.ends.clone()
        ends[-1] = len(route.local_order) if route.local_order is not None else ends[-1]
        return route._replace(groups=dispatch.Groups(ends))

    patch.setattr(experts_of_model, "make_route", planted)


def rows_of_the_next_room(patch: Patch) -> None:
    """A choice takes what came back for the one behind it."""

    def planted(*args: Any) -> Any:
        rows = in_rooms(*args)
        return rows._replace(inverse=rows.inverse + 1)

    in_rooms = dispatch._in_rooms
    patch.setattr(dispatch, "_in_rooms", planted)


def counts_of_another_source(patch: Patch) -> None:
    """Rows from one rank are sorted by the numbers of another one."""

    def planted(sizes: RouteSizes, room: int | None) -> Tensor:
        return arriving(sizes if room is None else sizes._replace(arriving=sizes.arriving.flip(0)), room)

    arriving = dispatch._arriving_experts
    patch.setattr(dispatch, "_arriving_experts", planted)


MISTAKES: Sequence[tuple[Callable[[Patch], None], Spread, set[str]]] = [
    (step_not_computed_again, replace(DP2, room=1.0), {"gradients", "metrics"}),
    (padding_in_the_last_group, replace(DP2, room=2.0), {"gradients"}),
    (rows_of_the_next_room, replace(DP2, room=2.0), {"gradients", "metrics"}),
    (counts_of_another_source, replace(DP2, room=2.0), {"gradients", "metrics"}),
]


@pytest.mark.parametrize(("plant", "spread", "shown_by"), MISTAKES, ids=[plant.__name__ for plant, *_ in MISTAKES])
def test_a_mistake_in_the_rooms_is_found(plant: Callable[[Patch], None], spread: Spread, shown_by: set[str]) -> None:
    """By comparison, or because a value of padding reached the loss and was no number: it may be any."""
    try:
        ranks, _ = trained("softmax", spread, plant)
    except RankError as error:
        if "must be finite" not in str(error):
            raise
        return
    differing = aspects_that_differ(ranks, serial(problem_with("softmax")))
    assert shown_by <= differing, differing
