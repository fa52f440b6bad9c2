"""Tests of communication overlap: exchanges complete while the rank computes, without a wait.

No clock is asked. A layer's hook holds the computation back until an exchange has arrived: only if that goes on by
itself does it ever arrive. What has begun, and what was waited for, is seen at the same moment.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from engines import NO_DROPOUT, open_job, take_step, world_size_of
from ranks import run_ranks

from benchmarks.overlap import Exchange, Recorder
from megatronish.launch.place import Place

PATIENCE = 20.0  # seconds until an exchange that nobody waits for counts as standing still

LAYERS = 4
FLAGS = f"--global-batch-size 8 --num-layers {LAYERS} --ddp-bucket-size 4500 {NO_DROPOUT}"  # a layer has 4872 elements


class Moment(NamedTuple):
    """What had begun, what somebody had begun to wait for and, after patience, what had arrived."""

    begun: int
    waited: int
    arrived: int


class Seen(NamedTuple):
    """When the backward of each layer began in the last micro-batch, and the forward in the first after an update."""

    backward: dict[str, Moment]
    forward: dict[str, Moment]


def look(exchanges: list[Exchange]) -> Moment:
    begun, waited = len(exchanges), sum(each.waited_at is not None for each in exchanges)
    return Moment(begun, waited, sum(each.arrived.wait(PATIENCE) for each in exchanges[:begun]))


def see(place: Place, flags: str) -> Seen:
    job = open_job(place, flags)
    engine = job.build_engine()
    take_step(job, engine, 0)
    recorder, seen = Recorder(), Seen({}, {})

    def looker(moments: dict[str, Moment], name: str, kind: str, *, first: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not first or name not in moments:
                moments[name] = look([each for each in recorder.exchanges if each.kind == kind])

        return hook

    for name, layer in engine.stage.model.get_submodule("layers").named_children():
        layer.register_full_backward_pre_hook(looker(seen.backward, name, "reduce", first=False))
    with recorder.listening():
        take_step(job, engine, 1)
        for name, layer in engine.stage.model.get_submodule("layers").named_children():
            layer.register_forward_pre_hook(looker(seen.forward, name, "gather", first=True))
        backward = dict(seen.backward)
        take_step(job, engine, 2)
    return Seen(backward, seen.forward)


SHARING = ["--dp 2", "--dp 2 --zero-stage 1 --bf16", "--dp 2 --zero-stage 2", "--dp 4 --zero-stage 1 --dp-replicate 2"]


@pytest.mark.parametrize("sharing", SHARING)
def test_gradients_of_later_layers_arrive_while_earlier_ones_go_backward(sharing: str) -> None:
    for seen in run_ranks(world_size_of(sharing), see, f"{FLAGS} {sharing}"):
        assert list(seen.backward) == ["3", "2", "1", "0"]
        before = seen.backward["3"].begun  # ZeRO-2 has exchanged in the backwards before this one, too
        for layer, moment in seen.backward.items():
            assert moment.begun - before == LAYERS - 1 - int(layer)
            assert moment.arrived == moment.begun
            assert moment.waited == 0 or ("stage 2" in sharing and moment.waited < moment.begun)


@pytest.mark.parametrize("sharing", SHARING[1:])
def test_parameters_of_later_layers_arrive_while_earlier_ones_go_forward(sharing: str) -> None:
    """Each layer waits for what it needs itself, and not for those after it."""
    for seen in run_ranks(world_size_of(sharing), see, f"{FLAGS} {sharing}"):
        moments = [seen.forward[layer] for layer in "0123"]
        assert {moment.begun for moment in moments} == {moments[-1].waited}
        assert all(moment.arrived == moment.begun for moment in moments)
        assert [later.waited - earlier.waited for earlier, later in pairwise(moments)] == [1, 1, 1]


def test_without_overlap_nothing_is_under_way() -> None:
    flags = f"{FLAGS} --dp 2 --zero-stage 1 --no-overlap-grad-reduce --no-overlap-param-gather"
    for seen in run_ranks(2, see, flags):
        assert {moment.begun for moment in seen.backward.values()} == {0}
        assert all(moment.waited == moment.begun > 0 for moment in seen.forward.values())
