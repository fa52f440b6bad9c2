"""Point-to-point transfers between stages: activations and their gradients, on lines of one kind and direction.

A transfer of activations (F) or of gradients (B) uses the line of its kind and of its direction, to a later stage or
to an earlier one. A receive is posted some actions early, so that the transfer overlaps with the computation of the
actions before. A send is waited for before the next send on its line, so at most one sent tensor a line is kept alive.
(On gloo a send completes only with its receive, and waiting for each send at once would deadlock 1F1B.) `simulate`
refuses plans that hang under exactly these rules.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.ranges import BUBBLE, marked
from megatronish.parallel.schedules.plan import Action, Placement

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
