"""Tests of the executor on real ranks: gradients and live activations are those of the plan."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from sweeps import some_of
from torch import Tensor, nn

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.linear import ColumnParallelLinear, split_backward
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.model.batch import MicroBatch
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel
from megatronish.parallel.pipeline.executor import Boundary, ChunkOutput, Executor
from megatronish.parallel.schedules.plan import Action, Placement, Plan, StageChunk, looped
from megatronish.parallel.schedules.simulate import simulate
from megatronish.parallel.schedules.table import RECEIVES_AHEAD, SCHEDULES

S, B, D = 3, 2, 4
LOSS_SCALE = 0.25
ALONE = Axis("alone")

Key = tuple[int, int]
"""Chunk and micro-batch."""


class Token:
    """Lives as long as what holds it."""

    def __init__(self, key: Key) -> None:
        self.key = key


class Watch:
    """What of each forward is alive on a rank: its graph, or a product in the queue of weight gradients."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Token] = weakref.WeakSet()
        self.queued: list[tuple[Key, weakref.ref[Tensor]]] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.outputs_held = 0
        self.peak = 0

    @property
    def alive(self) -> set[Key]:
        return {token.key for token in self.graphs} | {key for key, tensor in self.queued if tensor() is not None}


class WatchedGradients(WeightGradients):
    """Notes each tensor that it is given to keep."""

    def __init__(self, sums: dict[nn.Parameter, Tensor], watch: Watch) -> None:
        super().__init__(lambda weight: GradientSum(sums[weight]))
        self.watch = watch

    def defer(self, weight: nn.Parameter, dy: Tensor, x: Tensor, **others: Any) -> None:
        assert self._filling is not None
        self.watch.queued.append((self._filling, weakref.ref(dy)))
        super().defer(weight, dy, x, **others)

    def compute(self, *, chunk: int, micro_batch: int) -> None:
        others = set(self.pending) - {(chunk, micro_batch)}
        super().compute(chunk=chunk, micro_batch=micro_batch)
        assert set(self.pending) == others


class Trace(torch.autograd.Function):
    """Identity; keeps a token in its graph, and notes how much is alive when it is called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Key, watch: Watch) -> Tensor:
        ctx.token = Token(key)
        watch.graphs.add(ctx.token)
        watch.peak = max(watch.peak, len(watch.alive))
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class Piece(nn.Module):
    """A position of the model: x + tanh(W x) of what comes in, the sum of squares at the end."""

    def __init__(self, position: int, num_positions: int, *, chunk: int = 0, watch: Watch | None = None) -> None:
        super().__init__()
        self.is_first, self.is_last = position == 0, position == num_positions - 1
        self.chunk, self.watch = chunk, watch or Watch()
        self.linear = ColumnParallelLinear(D, D, tp=TensorParallel(), bias=True, init_std=1.0)
        generator = torch.Generator().manual_seed(position)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.steps: set[int | None] = set()

    def forward(self, x: Tensor | None, batch: MicroBatch, *, step: int | None) -> ChunkOutput:
        self.steps.add(step)
        assert (x is None) == self.is_first
        if x is None:
            x = batch.tokens.t()[..., None] * torch.ones(D)
        else:
            assert step is None or x.is_leaf
        self.watch.outputs_held = max(self.watch.outputs_held, sum(y() is not None for y in self.watch.outputs))
        y = Trace.apply(x + self.linear(x).tanh(), (self.chunk, int(batch.sample_ids[0])), self.watch)
        if self.is_last:
            loss = y.square().sum()
            return ChunkOutput(loss, {"loss": loss.detach(), "largest": y.detach().abs().max()})
        self.watch.outputs.append(weakref.ref(y))
        return ChunkOutput(y, {})


def batches(num_microbatches: int) -> list[MicroBatch]:
    """The number of the micro-batch and of the place is in the values."""
    return [batch_of(m, B, S) for m in range(num_microbatches)]


def batch_of(number: int, num_samples: int, seq_length: int) -> MicroBatch:
    tokens = torch.arange(num_samples * seq_length).view(num_samples, seq_length) * 0.1 + number
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    return MicroBatch(tokens, tokens, mask, tokens, torch.full((num_samples,), number))


class Case(NamedTuple):
    """A plan for a model of num_stages * num_chunks positions."""

    plan: Plan
    placement: Placement
    num_microbatches: int

    @property
    def has_weight_gradients(self) -> bool:
        return any(action.kind == "W" for row in self.plan for action in row)


class Seen(NamedTuple):
    """What one rank saw of a run. Gradients: [weight, bias] for each chunk; peaks: watched, and by the books."""

    total: float
    gradients: list[list[Tensor]]
    peaks: tuple[int, int]
    left: int
    steps: set[int | None]
    starting: list[tuple[Action, bool]]
    times: list[tuple[Action, float, float]]
    outputs_held: int


@contextmanager
def no_collector() -> Iterator[None]:
    """A graph must go by itself, not when the collector comes by."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def execute(place: Place, cases: list[Case], training: bool, repeats: int) -> list[list[Seen]]:
    """This rank's part of each plan, `repeats` times over, its forwards alone unless training."""
    mesh = Mesh.start(Layout(pp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    return [carry_out(mesh, case, training, repeats) for case in cases]


def append_to(found: list[Any]) -> Callable[..., None]:
    """Called with a, b, c: notes the tuple of them."""

    def note(*values: Any) -> None:
        found.append(values)

    return note


def carry_out(mesh: Mesh, case: Case, training: bool, repeats: int, *, same_over: Axis = ALONE) -> list[Seen]:
    watch = Watch()
    mine = sorted((here.chunk, position) for position, here in enumerate(case.placement) if here.stage == mesh.pp.rank)
    pieces = [Piece(position, len(case.placement), chunk=chunk, watch=watch) for chunk, position in mine]
    parameters = [parameter for piece in pieces for parameter in piece.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    queue = None
    if case.has_weight_gradients:
        queue = WatchedGradients({p: p.grad for p in parameters if p.grad is not None}, watch)
        for piece in pieces:
            split_backward(piece, queue)
    boundary = Boundary(D, torch.float32, mesh.device, TensorParallel(same_over))
    executor = Executor(pieces, case.placement, p2p_axes=mesh.p2p_axes, boundary=boundary, weight_gradients=queue)
    actions = case.plan[mesh.pp.rank]
    answers = []
    with no_collector():
        for _ in range(repeats):
            starting: list[tuple[Action, bool]] = []
            times: list[tuple[Action, float, float]] = []
            note, record = append_to(starting), append_to(times)
            if training:
                note = also_check_receives(note, executor, actions)
            if training:
                micro_batches = batches(case.num_microbatches)
                sums = executor.run(
                    actions, micro_batches, step=5, loss_gradient=LOSS_SCALE, begin_action=note, observers=[record]
                )
            else:
                forwards = [action for action in actions if action.kind == "F"]
                with torch.no_grad():
                    sums = executor.run(forwards, batches(case.num_microbatches), step=None, begin_action=note)
            answers.append(
                Seen(
                    total=float(sums.get("loss", 0.0)),
                    gradients=[[p.grad.clone() for p in piece.parameters() if p.grad is not None] for piece in pieces],
                    peaks=(watch.peak, executor.peak_live),
                    left=len(watch.alive) + sum(len(line.receiving) for line in executor.lines.values()),
                    steps=set().union(*(piece.steps for piece in pieces)),
                    starting=starting,
                    times=times,
                    outputs_held=watch.outputs_held,
                )
            )
    return answers


def also_check_receives(
    note: Callable[..., None], executor: Executor, actions: Sequence[Action]
) -> Callable[[Action, bool], None]:
    """When an action is about to compute, what the next ones need is already being received: it travels meanwhile."""
    expected = {action: actions[i + 1 : i + 1 + RECEIVES_AHEAD] for i, action in enumerate(actions)}

    def noted(action: Action, is_last: bool) -> None:
        receiving = {needed for line in executor.lines.values() for needed in line.receiving}
        for coming in expected[action]:
            source = executor._source(coming)
            assert source is None or source.stage == executor.stage or coming in receiving
        note(action, is_last)

    return noted


def serial(num_positions: int, num_microbatches: int) -> tuple[float, list[list[Tensor]]]:
    """The sum of losses, and the gradients of all positions."""
    pieces = [Piece(position, num_positions) for position in range(num_positions)]
    total = torch.zeros(())
    for batch in batches(num_microbatches):
        x: Tensor | None = None
        for piece in pieces:
            x = piece(x, batch, step=None).x
        assert x is not None
        total = total + x
    (total * LOSS_SCALE).backward()
    return float(total.detach()), [[p.grad for p in piece.parameters() if p.grad is not None] for piece in pieces]


def check(case: Case, answers: list[list[Seen]], *, repeats: int) -> None:
    """What every rank saw of a training run is what one process computes and what paper says."""
    expected, gradients = serial(len(case.placement), case.num_microbatches)
    paper = simulate(case.plan, placement=case.placement)
    for stage, runs in enumerate(answers):
        ends = case.placement[-1].stage == stage
        for number, seen in enumerate(runs, start=1):
            assert seen.total == pytest.approx(expected if ends else 0.0, rel=1e-6)
            positions = sorted((here.chunk, i) for i, here in enumerate(case.placement) if here.stage == stage)
            for actual, (_, position) in zip(seen.gradients, positions, strict=True):
                whole = [number * gradient for gradient in gradients[position]]
                torch.testing.assert_close(actual, whole, rtol=1e-5, atol=1e-6)
            assert seen.peaks == (paper.peak_live[stage],) * 2
            assert (seen.left, seen.steps, seen.outputs_held) == (0, {5}, 0)
            assert [action for action, _ in seen.starting] == case.plan[stage]
            assert [action for action, _, _ in seen.times] == case.plan[stage]
            moments = [moment for _, start, end in seen.times for moment in (start, end)]
            assert moments == sorted(moments)
            last = {(action.kind, action.chunk): action for action in case.plan[stage]}
            assert {action for action, is_last in seen.starting if is_last} == set(last.values())
        assert len(runs) == repeats


def cases_of(schedule: str, num_stages: int) -> list[Case]:
    """The schedule with several numbers of micro-batches, fewer than stages too, and of chunks."""
    chosen = SCHEDULES[schedule]
    found = []
    for num_chunks in (chosen.num_chunks,) if chosen.num_chunks else (1, 2, 3):
        size: dict[str, int] = {"num_stages": num_stages, "num_chunks": num_chunks}
        for m in (1, 2, 3, 5):
            found.append(Case(chosen.plan(num_microbatches=m, **size), chosen.place(**size), m))
    return found


@pytest.mark.parametrize("num_stages", some_of([1, 2, 3, 4], [1, 3]))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_computes_what_one_process_does_and_holds_what_the_plan_says(schedule: str, num_stages: int) -> None:
    """Twice in a row: a step leaves the lines ready for the next, and gradients add up."""
    cases = cases_of(schedule, num_stages)
    by_rank = run_ranks(num_stages, execute, cases, True, 2)
    for case, answers in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, list(answers), repeats=2)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_evaluation_is_forward_alone_and_keeps_nothing(num_stages: int) -> None:
    cases = [case for schedule in SCHEDULES for case in cases_of(schedule, num_stages) if case.num_microbatches == 3]
    by_rank = run_ranks(num_stages, execute, cases, False, 2)
    for case, answers in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected, _ = serial(len(case.placement), 3)
        for stage, runs in enumerate(answers):
            for seen in runs:
                assert seen.total == pytest.approx(expected if case.placement[-1].stage == stage else 0.0, rel=1e-6)
                assert not any(bool(gradient.any()) for chunk in seen.gradients for gradient in chunk)
                assert (seen.left, seen.steps, seen.peaks[1]) == (0, {None}, 0)


def test_zero_bubble_gradients_are_those_of_1f1b() -> None:
    """Each weight's products are added in the order of its micro-batches under both; only that a product is added up
    in the sum itself (addmm) and not beside it may change a last bit. Biases come from autograd either way."""
    plans = [SCHEDULES[name].plan(num_stages=3, num_microbatches=6) for name in ("1f1b", "zb-h1")]
    cases = [Case(plan, looped(num_stages=3), 6) for plan in plans]
    for whole, split in run_ranks(3, execute, cases, True, 1):
        (weight, bias), (same_weight, same_bias) = whole[0].gradients[0], split[0].gradients[0]
        torch.testing.assert_close(weight, same_weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(bias, same_bias)


def test_any_plan_in_any_placement_runs_unchanged() -> None:
    """Written by hand: up and down, over a stage, and from chunk to chunk of one stage. A schedule is data.

    The last micro-batch comes back first: the last backward, which makes gradients final, is that of the first.
    """
    placement = [StageChunk(1, 0), StageChunk(0, 0), StageChunk(0, 1), StageChunk(2, 0), StageChunk(1, 1)]
    plan: Plan = []
    for stage in range(3):
        chunks = [place.chunk for place in placement if place.stage == stage]
        forwards = [Action("F", chunk, m) for m in (0, 1) for chunk in chunks]
        plan.append(forwards + [Action("B", chunk, m) for m in (1, 0) for chunk in reversed(chunks)])
    case = Case(plan, placement, 2)
    check(case, [runs for (runs,) in run_ranks(3, execute, [case], True, 2)], repeats=2)


def in_many_shapes(place: Place, batches: list[MicroBatch]) -> tuple[dict[int, float], list[Tensor]]:
    """What ended the model here, by micro-batch, and the gradients of this stage."""
    mesh = Mesh.start(Layout(pp=2), rank=place.rank, init_method=place.rendezvous)
    piece = Piece(mesh.pp.rank, 2)
    boundary = Boundary(D, torch.float32, mesh.device)
    executor = Executor([piece], looped(num_stages=2), p2p_axes=mesh.p2p_axes, boundary=boundary)
    ended: dict[int, float] = {}

    def note(micro_batch: int, output: Tensor) -> None:
        assert not output.requires_grad
        ended[micro_batch] = float(output)

    actions = SCHEDULES["1f1b"].row(stage=mesh.pp.rank, num_stages=2, num_microbatches=len(batches))
    executor.run(actions, batches, step=0, on_model_output=note)
    return ended, [p.grad for p in piece.parameters() if p.grad is not None]


def test_micro_batches_of_one_run_may_differ_in_shape_and_the_caller_gets_what_ends_the_model() -> None:
    shapes = [(1, 5), (4, 1), (2, 3)]
    batches = [batch_of(number, *shape) for number, shape in enumerate(shapes)]
    first, last = Piece(0, 2), Piece(1, 2)
    losses = [last(first(None, batch, step=None).x, batch, step=None).x for batch in batches]
    torch.stack(losses).sum().backward()
    (nothing, before), (ended, after) = run_ranks(2, in_many_shapes, batches)
    assert nothing == {}
    assert ended == pytest.approx({number: float(loss.detach()) for number, loss in enumerate(losses)}, rel=1e-6)
    for piece, found in ((first, before), (last, after)):
        torch.testing.assert_close(found, [p.grad for p in piece.parameters()], rtol=1e-5, atol=1e-6)


def in_slices(place: Place, case: Case) -> list[list[Seen]]:
    mesh = Mesh.start(Layout(pp=2, tp=2), rank=place.rank, init_method=place.rendezvous)
    return [carry_out(mesh, case, True, 1, same_over=axis) for axis in (ALONE, mesh.tp)]


def test_what_all_tp_ranks_have_travels_in_slices_and_arrives_to_the_last_bit() -> None:
    schedule = SCHEDULES["interleaved"]
    case = Case(
        schedule.plan(num_stages=2, num_microbatches=3, num_chunks=2), schedule.place(num_stages=2, num_chunks=2), 3
    )
    for (whole,), (gathered,) in run_ranks(4, in_slices, case):
        assert whole.total == gathered.total
        for chunk, same in zip(whole.gradients, gathered.gradients, strict=True):
            assert all(map(torch.equal, chunk, same))


def test_a_boundary_is_cut_into_equal_slices_or_not_at_all() -> None:
    x = torch.arange(24.0).view(S, B, D)
    for size in (1, 2, 4):
        for rank in range(size):
            boundary = Boundary(D, torch.float32, x.device, TensorParallel(Axis("tp", size, rank)))
            assert torch.equal(boundary.slice_of(x), x.view(size, -1)[rank])
            assert boundary.empty_slice((S, B, D)).shape == (24 // size,)
    odd = Boundary(D, torch.float32, x.device, TensorParallel(Axis("tp", 5, 3)))
    assert torch.equal(odd.whole(odd.slice_of(x), (S, B, D)), x)
