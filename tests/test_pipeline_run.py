"""The executor on real ranks: what a plan promises on paper (gradients, live activations) is what happens."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from megatronish.launch.place import Place
from megatronish.mesh.groups import Axis, Mesh
from megatronish.mesh.layout import Layout
from megatronish.model.batch import MicroBatch
from megatronish.pipeline.run import Boundary, Executor
from megatronish.pipeline.schedule import SCHEDULES, Action, Plan, looped
from megatronish.pipeline.simulate import simulate

S, B, D = 3, 2, 4
LOSS_SCALE = 0.25


class Token:
    """Lives as long as the graph of the forward pass that made it."""


class Trace(torch.autograd.Function):
    """Identity; notes how many graphs are alive when it is called, and keeps a token in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: "weakref.WeakSet[Token]", peaks: list[int]) -> Tensor:
        ctx.token = Token()
        alive.add(ctx.token)
        peaks.append(len(alive))
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class Piece(nn.Module):
    """Position `position` of `num_positions`: tanh(x W) of what comes in, the sum of squares at the end."""

    def __init__(self, position: int, num_positions: int) -> None:
        super().__init__()
        self.is_first, self.is_last = position == 0, position == num_positions - 1
        generator = torch.Generator().manual_seed(position)
        self.weight = nn.Parameter(torch.randn(D, D, generator=generator))
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.peaks: list[int] = []
        self.steps: set[int | None] = set()

    def forward(self, x: Tensor | None, batch: MicroBatch, *, step: int | None) -> Tensor:
        self.steps.add(step)
        assert (x is None) == self.is_first
        x = batch.tokens.t()[..., None] * torch.ones(D) if x is None else x
        y = Trace.apply((x @ self.weight).tanh(), self.alive, self.peaks)
        return y.square().sum() if self.is_last else y


def batches(num_microbatches: int) -> list[MicroBatch]:
    """The number of the micro-batch and of the place is in the values."""
    found = []
    for m in range(num_microbatches):
        tokens = torch.arange(B * S).view(B, S) * 0.1 + m
        mask = torch.ones(B, S, dtype=torch.bool)
        found.append(MicroBatch(tokens, tokens, mask, tokens, torch.arange(B)))
    return found


class Seen(NamedTuple):
    """What one rank saw."""

    total: float
    gradients: list[Tensor | None]
    peaks: list[int]
    still_alive: int
    pending: int
    steps: set[int | None]


def execute(place: Place, plan: Plan, num_chunks: int, num_microbatches: int, training: bool, repeats: int) -> Seen:
    """This rank's part of the plan, its forwards alone unless training."""
    num_stages = place.world_size
    mesh = Mesh.start(Layout(pp=num_stages), rank=place.rank, init_method=place.rendezvous)
    num_positions = num_stages * num_chunks
    pieces = [Piece(chunk * num_stages + place.rank, num_positions) for chunk in range(num_chunks)]
    boundary = Boundary((S, B, D), torch.float32, mesh.device)
    placement = looped(num_stages=num_stages, num_chunks=num_chunks)
    executor = Executor(pieces, placement, forward=mesh.pp, backward=mesh.backward, boundary=boundary)
    actions: Sequence[Action] = plan[place.rank]
    last_backward: list[int] = []

    def before_last_backward() -> None:
        last_backward.append(1)

    gc.disable()  # a graph must go by itself, not when the collector comes by
    try:
        for _ in range(repeats):
            if training:
                total = executor.run(
                    actions,
                    batches(num_microbatches),
                    step=5,
                    loss_scale=LOSS_SCALE,
                    before_last_backward=before_last_backward,
                )
            else:
                forwards = [action for action in actions if action.kind == "F"]
                with torch.no_grad():
                    total = executor.run(forwards, batches(num_microbatches), step=None)
        still_alive = sum(len(piece.alive) for piece in pieces)
    finally:
        gc.enable()
    assert len(last_backward) == (repeats if training else 0)
    return Seen(
        total=float(total),
        gradients=[piece.weight.grad for piece in pieces],
        peaks=[max(piece.peaks) for piece in pieces],
        still_alive=still_alive,
        pending=len(executor.forward_line.receiving) + len(executor.backward_line.receiving),
        steps=set().union(*(piece.steps for piece in pieces)),
    )


def serial(num_positions: int, num_microbatches: int) -> tuple[float, list[Tensor]]:
    """The sum of losses, and the gradients of all positions."""
    pieces = [Piece(position, num_positions) for position in range(num_positions)]
    total = torch.zeros(())
    for batch in batches(num_microbatches):
        x: Tensor | None = None
        for piece in pieces:
            x = piece(x, batch, step=None)
        assert x is not None
        total = total + x
    (total * LOSS_SCALE).backward()
    return float(total.detach()), [piece.weight.grad for piece in pieces if piece.weight.grad is not None]


SIZES = [(1, 3), (2, 1), (2, 5), (3, 2), (4, 1), (4, 6)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_a_pipeline_computes_what_one_process_does_and_holds_what_the_plan_says(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    plan = SCHEDULES[schedule].plan(num_stages=num_stages, num_microbatches=num_microbatches)
    expected, gradients = serial(num_stages, num_microbatches)
    answers = run_ranks(num_stages, execute, plan, 1, num_microbatches, True, 1)
    assert answers[-1].total == pytest.approx(expected, rel=1e-6)
    assert [seen.total for seen in answers[:-1]] == [0.0] * (num_stages - 1)
    for seen, gradient in zip(answers, gradients, strict=True):
        assert seen.gradients[0] is not None
        torch.testing.assert_close(seen.gradients[0], gradient, rtol=1e-5, atol=1e-6)
        assert (seen.still_alive, seen.pending, seen.steps) == (0, 0, {5})
    assert [seen.peaks[0] for seen in answers] == simulate(plan).peak_live


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_evaluation_is_forward_alone_and_keeps_nothing(num_stages: int) -> None:
    plan = SCHEDULES["1f1b"].plan(num_stages=num_stages, num_microbatches=5)
    answers = run_ranks(num_stages, execute, plan, 1, 5, False, 2)
    assert answers[-1].total == pytest.approx(serial(num_stages, 5)[0], rel=1e-6)
    for seen in answers:
        assert (seen.gradients, seen.still_alive, seen.pending, seen.steps) == ([None], 0, 0, {None})


def test_a_step_leaves_the_lines_ready_for_the_next() -> None:
    plan = SCHEDULES["1f1b"].plan(num_stages=3, num_microbatches=4)
    once = run_ranks(3, execute, plan, 1, 4, True, 1)
    twice = run_ranks(3, execute, plan, 1, 4, True, 2)
    for one, two in zip(once, twice, strict=True):
        assert one.gradients[0] is not None and two.gradients[0] is not None
        assert two.total == one.total
        torch.testing.assert_close(two.gradients[0], 2 * one.gradients[0])


def test_a_plan_that_goes_round_the_stages_twice_runs_unchanged() -> None:
    """An interleaved plan, written by hand: a schedule is data."""
    forwards = [Action("F", chunk, m) for chunk in (0, 1) for m in (0, 1)]
    backwards = [Action("B", chunk, m) for chunk in (1, 0) for m in (0, 1)]
    plan = [forwards + backwards] * 2
    simulate(plan)  # does not hang
    expected, gradients = serial(4, 2)
    answers = run_ranks(2, execute, plan, 2, 2, True, 1)
    assert answers[1].total == pytest.approx(expected, rel=1e-6)
    for chunk, stage in ((chunk, stage) for chunk in (0, 1) for stage in (0, 1)):
        actual = answers[stage].gradients[chunk]
        assert actual is not None
        torch.testing.assert_close(actual, gradients[2 * chunk + stage], rtol=1e-5, atol=1e-6)


def test_a_weight_gradient_action_is_refused_for_now() -> None:
    boundary = Boundary((S, B, D), torch.float32, torch.device("cpu"))
    alone = Axis("pp")
    executor = Executor([Piece(0, 1)], looped(num_stages=1), forward=alone, backward=alone, boundary=boundary)
    with pytest.raises(NotImplementedError, match="no weight-gradient actions yet"):
        executor.run([Action("F", 0, 0), Action("W", 0, 0)], batches(1), step=0)
