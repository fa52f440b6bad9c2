"""Executor of a pipeline schedule on one rank: one loop over the actions of its plan, and transfers between stages.

Activations are sent to the next position of the model, gradients to the one before; where that is another chunk of the
same stage they are passed on directly. weight_gradients.py computes W actions.

A transfer of activations (F) or of gradients (B) uses the line of its kind and of its direction, to a later stage or
to an earlier one. A receive is posted some actions early, so that the transfer overlaps with the computation of the
actions before. A send is waited for before the next send on its line, so at most one sent tensor a line is kept alive.
(On gloo a send completes only with its receive, and waiting for each send at once would deadlock 1F1B.) `simulate`
refuses plans that hang under exactly these rules.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatronish.layers.weight_gradients import WeightGradients
from megatronish.model.batch import MicroBatch
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel
from megatronish.parallel.ranges import BUBBLE, marked
from megatronish.parallel.schedules.plan import Action, Placement, StageChunk, routes
from megatronish.parallel.schedules.table import RECEIVES_AHEAD
from megatronish.watch.record import RankRecord

Shape = tuple[int, int, int]
"""[S, B, D], or [S/tp, B, D] under sequence parallelism."""


@dataclass(frozen=True)
class Boundary:
    """Hidden states between two positions: [S, B, D] of a micro-batch (sequence parallel: [S/tp, B, D]).

    Every stage knows the shape from its own copy of the micro-batch, so micro-batches of one run may differ in shape:
    prompts and single tokens in generation. `same_over` is the axis over which all ranks have the same tensor: tp,
    unless it cuts the sequence. Each rank of it then sends one slice to its counterpart, and the receiving ranks
    all-gather the slices: scatter-gather of Narayanan et al. 2021 (arXiv:2104.04473, section 4.1). So no byte is sent
    twice between two stages.
    """

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel = field(default_factory=TensorParallel)

    @property
    def same_over(self) -> Axis:
        """Axis of the ranks that have the same tensor."""
        return Axis("tp") if self.tp.cuts_sequence else self.tp.axis

    def shape_of(self, micro_batch: MicroBatch) -> Shape:
        """Shape of the hidden states of a micro-batch, and of their gradients."""
        num_samples, seq_length = micro_batch.tokens.shape
        return seq_length // self.tp.sequence_axis.size, num_samples, self.hidden_size

    def slice_of(self, x: Tensor) -> Tensor:
        """[S, B, D] -> [S B D / size]: the slice that this rank sends."""
        return comm.piece_of(x.reshape(-1), self._cut_over(x.numel()))

    def empty_slice(self, shape: Shape) -> Tensor:
        """The receive buffer of a slice, [S B D / size]."""
        numel = math.prod(shape)
        return torch.empty(numel // self._cut_over(numel).size, dtype=self.dtype, device=self.device)

    def whole(self, piece: Tensor, shape: Shape) -> Tensor:
        """[S B D / size] -> [S, B, D]: all-gather of the slices over `same_over`."""
        return comm.start_all_gather(piece, self._cut_over(math.prod(shape))).wait().view(shape)

    def _cut_over(self, numel: int) -> Axis:
        """`same_over`, or an axis of one rank if a tensor of `numel` elements cannot be cut into equal slices."""
        return Axis("tp") if numel % self.same_over.size else self.same_over


@dataclass
class Line:
    """A p2p line: this rank's sends and receives of one kind (F or B) in one direction."""

    axis: Axis
    boundary: Boundary
    receiving: dict[Action, comm.Pending] = field(default_factory=dict)
    sending: comm.Pending | None = None

    def post(self, action: Action, shape: Shape, *, source: int, tag: int) -> None:
        """Post the receive of the input of `action` from stage `source`, unless it is posted already."""
        if action not in self.receiving:
            buffer = self.boundary.empty_slice(shape)
            self.receiving[action] = comm.start_receive(buffer, self.axis, source=source, tag=tag)

    def take(self, action: Action, shape: Shape) -> Tensor:
        """Wait for the input of `action`, [S, B, D], whose receive was posted."""
        with marked(BUBBLE):
            piece = self.receiving.pop(action).wait()
        return self.boundary.whole(piece, shape)

    def send(self, x: Tensor, *, to: int, tag: int) -> None:
        """Start sending x [S, B, D] to stage `to`, after the last send on this line is complete."""
        self.flush()
        self.sending = comm.start_send(self.boundary.slice_of(x), self.axis, to=to, tag=tag)

    def flush(self) -> None:
        """Wait until the last send is complete."""
        if self.sending is not None:
            self.sending.wait()
            self.sending = None


def connect(lines: Mapping[tuple[str, bool], Line], placement: Placement, *, stage: int) -> None:
    """Use every p2p connection of this rank once, in an order that all ranks share.

    Two NCCL ranks connect at their first transfer, and each blocks there until the other arrives. Within a plan, where
    receives are posted before the sends that they depend on, this would deadlock.
    """
    # 1. Neighbours in the model, on different stages: activations go from a to b, gradients from b to a.
    pairs = [(a.stage, b.stage) for a, b in pairwise(placement) if a.stage != b.stage]
    transfers = [("F", a, b) for a, b in pairs] + [("B", b, a) for a, b in pairs]
    # 2. One element on each line between each pair, once, in the order of the placement, which is the same on every
    #    rank: so the first transfer that has not happened yet never waits for a later one.
    for kind, source, to in dict.fromkeys(transfers):
        line = lines[kind, to > source]
        message = torch.zeros(1, device=line.boundary.device)
        if stage == source:
            comm.start_send(message, line.axis, to=to, tag=0).wait()
        elif stage == to:
            comm.start_receive(message, line.axis, source=source, tag=0).wait()


class ChunkOutput(NamedTuple):
    """Output of a chunk's forward.

    `x` [S, B, D] is the input of the next position. At the end of the model it is the scalar that backward starts from;
    without backward it is any tensor for `on_model_output`, logits for example. `sums` are tensors without a graph, to
    be added up over micro-batches.
    """

    x: Tensor
    sums: Mapping[str, Tensor]


class ChunkForward(Protocol):
    """The forward of a model chunk on x [S, B, D], None for the first position. `step` None means evaluation."""

    def __call__(self, x: Tensor | None, micro_batch: MicroBatch, /, *, step: int | None) -> ChunkOutput: ...


class SavedForward(NamedTuple):
    """A forward's input, the graph edge of its output, and the gradient of a loss, saved for its backward.

    The values of the output are not saved: they are freed as soon as they have been sent, unless the graph itself saves
    them. (Megatron-LM empties the output's storage for the same purpose.) Without an edge nothing up to here learns.
    """

    x: Tensor | None
    output: GradientEdge | None
    gradient: Tensor | None


Observer = Callable[[Action, float, float], None]
"""Called after each action with its start (its input has arrived) and its end, in seconds of time.perf_counter."""


def _ignore(_action: Action, _is_last: bool) -> None:
    """Default of `begin_action`: no data-parallel communication depends on the action."""


def _drop(_micro_batch: int, _output: Tensor) -> None:
    """Default of `on_model_output`: only the sums are used."""


class Executor:
    """Executes this stage's actions on its chunks of the model.

    `weight_gradients` is the queue of the chunks' deferred weight gradients: given for plans with W actions, and only
    for them. `peak_live` is the largest number of activations (of one micro-batch in one chunk) that the last run held
    at once, from their forward until their backward was complete: B, or W in a plan with W.

    `record` is shown the action at work. The constructor connects the stages: every rank of the pipeline calls it at
    the same time.
    """

    def __init__(
        self,
        chunks: Sequence[ChunkForward],
        placement: Placement,
        *,
        p2p_axes: Mapping[tuple[str, bool], Axis],
        boundary: Boundary,
        weight_gradients: WeightGradients | None = None,
        record: RankRecord | None = None,
    ) -> None:
        self.record = record or RankRecord()
        self.chunks, self.boundary, self.weight_gradients = chunks, boundary, weight_gradients
        self.lines = {direction: Line(axis, boundary) for direction, axis in p2p_axes.items()}
        self.stage = p2p_axes["F", True].rank
        self.peak_live = 0
        self._routes = routes(placement)
        self._num_chunks = 1 + max(place.chunk for place in placement)
        self._forwards: dict[tuple[int, int], SavedForward] = {}
        self._handed_over: dict[Action, Tensor] = {}
        connect(self.lines, placement, stage=self.stage)

    def with_chunks(self, chunks: Sequence[ChunkForward]) -> "Executor":
        """An executor of other forwards of the same stage, over the same connections: only one of the two runs."""
        other = copy(self)
        other.chunks, other._forwards, other._handed_over = chunks, {}, {}
        return other

    # In the loop below each turn frees what it can before the next one waits for its input, which may take long. A plan
    # without B (evaluation, generation) saves nothing for a backward; one with W defers weight gradients. The last
    # action of each kind in a chunk is the one that makes gradients final.
    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        *,
        step: int | None,
        loss_gradient: float = 1.0,
        begin_action: Callable[[Action, bool], None] = _ignore,
        on_model_output: Callable[[int, Tensor], None] = _drop,
        observers: Sequence[Observer] = (),
    ) -> dict[str, Tensor]:
        """Execute the actions; return the sums of this rank's chunks over the micro-batches by name, fp32 or integers.

        Backward starts from `loss_gradient`, that of the last position's output. `step` None means evaluation.
        `begin_action` is called before each action, with whether it is the last one of its kind in its chunk.
        `on_model_output` is called with the number of each micro-batch and its output of the last position, without a
        graph, on the stage that holds this position.
        """
        totals: dict[str, Tensor] = {}
        shapes = [self.boundary.shape_of(micro_batch) for micro_batch in micro_batches]
        last = {(action.kind, action.chunk): action for action in actions}
        training = any(action.kind == "B" for action in actions)
        splits = any(action.kind == "W" for action in actions)
        assert not training or splits == (self.weight_gradients is not None), "a plan has W if its backward is split"
        self.peak_live = 0
        for i, action in enumerate(actions):
            self.record.action = action
            # 1. Post the receives of this action and of those just ahead, so that tensors arrive in the meantime.
            for upcoming in actions[i : i + 1 + RECEIVES_AHEAD]:
                self._post(upcoming, shapes[upcoming.micro_batch])
            # 2. Wait for this action's input: [S, B, D], or the gradient of what this chunk has sent.
            begin_action(action, action == last[action.kind, action.chunk])
            arrived = self._take(action, shapes[action.micro_batch])
            start = self._now() if observers else 0.0
            # 3. Compute.
            output: Tensor | None = None
            if action.kind == "F":
                micro_batch = micro_batches[action.micro_batch]
                output = self._forward(action, arrived, micro_batch, step, loss_gradient if training else None, totals)
            elif action.kind == "B":
                output = self._backward(action, arrived)
            else:
                assert self.weight_gradients is not None
                self.weight_gradients.compute(chunk=action.chunk, micro_batch=action.micro_batch)
            if observers:
                end = self._now()
                for observe in observers:
                    observe(action, start, end)
            # 4. Send the output to the position that needs it; at the end of the model the caller gets it.
            if output is not None and self._target(action) is not None:
                self._deliver(action, output)
            elif output is not None and action.kind == "F":
                on_model_output(action.micro_batch, output)
            del arrived, output  # frees both before the next action waits for its input
            self.peak_live = max(self.peak_live, len(self._live()))
        for line in self.lines.values():
            line.flush()
        self.record.action = None
        assert not self._live(), f"the plan never completes {sorted(self._live())}"
        return totals

    def _forward(
        self,
        action: Action,
        x: Tensor | None,
        micro_batch: MicroBatch,
        step: int | None,
        loss_gradient: float | None,
        totals: dict[str, Tensor],
    ) -> Tensor:
        """The chunk's output; its sums are added to `totals`. `loss_gradient` None saves nothing for a backward."""
        # A leaf of this chunk's graph: its gradient is what the position before needs.
        if x is not None:
            x.requires_grad_(loss_gradient is not None)
        y, sums = self.chunks[action.chunk](x, micro_batch, step=step)
        for name, value in sums.items():
            add_sum(totals, name, value)
        # At the end of the model backward starts from this gradient, elsewhere from the one that arrives. Only
        # a first position whose parameters are all frozen has no edge: any other has an input that needs a gradient.
        if loss_gradient is not None:
            gradient = y.new_full((), loss_gradient) if self._target(action) is None else None
            edge = get_gradient_edge(y) if y.requires_grad else None
            self._forwards[_place_in(action)] = SavedForward(x, edge, gradient)
        return y.detach()

    def _backward(self, action: Action, dy: Tensor | None) -> Tensor | None:
        """The gradient of the chunk's input [S, B, D]; None for the first position."""
        # The queue of this backward is opened also where it defers nothing, so that its W action finds it.
        if self.weight_gradients is not None:
            self.weight_gradients.fill(chunk=action.chunk, micro_batch=action.micro_batch)
        x, output, gradient = self._forwards.pop(_place_in(action))
        # The popped record was the last to hold the input: it is freed once its gradient has been sent.
        if output is not None:
            torch.autograd.backward((output,), (dy if gradient is None else gradient,))
        return None if x is None else x.grad

    def _post(self, action: Action, shape: Shape) -> None:
        """Post the receive of the action's input, if it comes from another stage."""
        source = self._source(action)
        if source is not None and source.stage != self.stage:
            line = self.lines[action.kind, self.stage > source.stage]
            line.post(action, shape, source=source.stage, tag=self._tag(action))

    def _take(self, action: Action, shape: Shape) -> Tensor | None:
        """Wait for the action's input from another position; None if it needs none."""
        source = self._source(action)
        if source is None:
            return None
        if source.stage == self.stage:
            return self._handed_over.pop(action)
        return self.lines[action.kind, self.stage > source.stage].take(action, shape)

    def _deliver(self, action: Action, output: Tensor) -> None:
        """Pass the action's output to the action that needs it: directly within the stage, else by a send."""
        # An output of F is the input of the next position's F, one of B that of the B before: the kind stays, the chunk
        # changes.
        target = self._target(action)
        assert target is not None
        needed_by = action._replace(chunk=target.chunk)
        if target.stage == self.stage:
            self._handed_over[needed_by] = output
        else:
            line = self.lines[action.kind, target.stage > self.stage]
            line.send(output, to=target.stage, tag=self._tag(needed_by))

    def _source(self, action: Action) -> StageChunk | None:
        return self._routes[action.kind, StageChunk(self.stage, action.chunk)].source

    def _target(self, action: Action) -> StageChunk | None:
        return self._routes[action.kind, StageChunk(self.stage, action.chunk)].target

    def _tag(self, action: Action) -> int:
        """Tag of the message that an action needs, unique on its line (which has one kind and one direction)."""
        return action.micro_batch * self._num_chunks + action.chunk

    def _live(self) -> Set[tuple[int, int]]:
        """Chunk and micro-batch of the forwards whose backward is not complete."""
        pending = self.weight_gradients.pending if self.weight_gradients is not None else set()
        return self._forwards.keys() | pending

    def _now(self) -> float:
        """Time in seconds, after the device has finished all work submitted so far."""
        if self.boundary.device.type == "cuda":
            torch.cuda.synchronize(self.boundary.device)
        return time.perf_counter()


def add_sum(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add a micro-batch's `value` to the sum of this name: in fp32, but integers in their own dtype, exactly."""
    if name not in totals:
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        totals[name] = torch.zeros_like(value, dtype=dtype)
    totals[name] += value


def _place_in(action: Action) -> tuple[int, int]:
    return action.chunk, action.micro_batch


def meet_stages(mesh: Mesh) -> None:
    """Returns when all stages have done their actions: a profile has the end of the bubble here.

    Without it the bubble would be in the first collective that follows, over whatever axis that is.
    """
    with marked(BUBBLE):
        comm.all_reduce(torch.zeros((), device=mesh.device), mesh.pp)
