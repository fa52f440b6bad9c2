"""How does a rank carry out its part of a plan? One loop over actions, for every schedule.

Activations travel to the next position of the model, gradients to the one before. A receive is posted one action
early, so that a tensor can travel while the action before it computes; a send is waited for before the next one in
the same direction, so at most one sent tensor for each direction is kept alive. On gloo a send is finished only by
its receive; waiting at once for each would deadlock 1F1B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.mesh.groups import Axis
from megatronish.model.batch import MicroBatch
from megatronish.pipeline.schedule import Action, Place, Placement


@dataclass(frozen=True)
class Boundary:
    """What crosses from one position to the next: tensors of one shape [S, B, D] (sequence parallel: [S/tp, B, D])."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Line:
    """This rank's end of the transfers in one direction."""

    axis: Axis
    boundary: Boundary
    receiving: dict[Action, comm.Pending] = field(default_factory=dict)
    sending: comm.Pending | None = None

    def post(self, action: Action, source: int, tag: int) -> None:
        """Be ready for what `action` needs."""
        if action not in self.receiving:
            buffer = torch.empty(self.boundary.shape, dtype=self.boundary.dtype, device=self.boundary.device)
            self.receiving[action] = comm.start_receive(buffer, self.axis, source=source, tag=tag)

    def take(self, action: Action) -> Tensor:
        """What `action` needs, once it is here."""
        return self.receiving.pop(action).wait()

    def send(self, x: Tensor, to: int, tag: int) -> None:
        """Hand x on."""
        self.flush()
        self.sending = comm.start_send(x, self.axis, to=to, tag=tag)

    def flush(self) -> None:
        """Returns once the last send is done."""
        if self.sending is not None:
            self.sending.wait()
            self.sending = None


class Executor:
    """Carries out this stage's actions on its chunks of the model.

    A chunk is a module (x or None, micro_batch, step=…) -> x, or the sum of losses where it ends the model.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], placement: Placement, *, forward: Axis, backward: Axis, boundary: Boundary
    ) -> None:
        self.chunks, self.placement = chunks, placement
        self.stage = forward.rank
        self.forward_line, self.backward_line = Line(forward, boundary), Line(backward, boundary)

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        *,
        step: int | None,
        loss_scale: float = 1.0,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """The sum of the losses of the micro-batches, fp32 (zero on ranks that do not end the model).

        Backward starts from `loss_scale` times each loss. `step` None means evaluation.
        """
        total = torch.zeros((), dtype=torch.float32, device=self.forward_line.boundary.device)
        alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        last_backward = max((i for i, action in enumerate(actions) if action.kind == "B"), default=None)
        training = last_backward is not None
        for i, action in enumerate(actions):
            for upcoming in actions[i : i + 2]:
                self._post(upcoming, len(micro_batches))
            if i == last_backward:
                before_last_backward()
            key = (action.chunk, action.micro_batch)
            if action.kind == "F":
                alive[key] = self._forward(action, micro_batches, step=step, training=training)
                if self._next(action.chunk) is None:
                    total += alive[key][1].detach()
                if not training:
                    del alive[key]
            elif action.kind == "B":
                self._backward(action, *alive.pop(key), loss_scale=loss_scale, num_microbatches=len(micro_batches))
            else:
                raise NotImplementedError(f"no weight-gradient actions yet: {action}")
        self.forward_line.flush()
        self.backward_line.flush()
        return total

    def _forward(
        self, action: Action, micro_batches: Sequence[MicroBatch], *, step: int | None, training: bool
    ) -> tuple[Tensor | None, Tensor]:
        x = None
        if self._previous(action.chunk) is not None:
            x = self.forward_line.take(action).requires_grad_(training)
        y = self.chunks[action.chunk](x, micro_batches[action.micro_batch], step=step)
        following = self._next(action.chunk)
        if following is not None:
            tag = following.chunk * len(micro_batches) + action.micro_batch
            self.forward_line.send(y.detach(), following.stage, tag)
        return x, y

    def _backward(
        self, action: Action, x: Tensor | None, y: Tensor, *, loss_scale: float, num_microbatches: int
    ) -> None:
        if self._next(action.chunk) is None:
            (y * loss_scale).backward()
        else:
            y.backward(self.backward_line.take(action))
        previous = self._previous(action.chunk)
        if previous is not None:
            assert x is not None
            assert x.grad is not None
            self.backward_line.send(x.grad, previous.stage, previous.chunk * num_microbatches + action.micro_batch)

    def _post(self, action: Action, num_microbatches: int) -> None:
        tag = action.chunk * num_microbatches + action.micro_batch
        previous, following = self._previous(action.chunk), self._next(action.chunk)
        if action.kind == "F" and previous is not None:
            self.forward_line.post(action, previous.stage, tag)
        elif action.kind == "B" and following is not None:
            self.backward_line.post(action, following.stage, tag)

    def _previous(self, chunk: int) -> Place | None:
        position = self.placement.index(Place(self.stage, chunk))
        return self.placement[position - 1] if position > 0 else None

    def _next(self, chunk: int) -> Place | None:
        position = self.placement.index(Place(self.stage, chunk))
        return self.placement[position + 1] if position + 1 < len(self.placement) else None
