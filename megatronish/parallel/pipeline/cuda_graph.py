"""Replay of micro-batches from one CUDA graph (--cuda-graph): the host launches one graph in place of every kernel.

What is captured is the forward and the backward of one micro-batch, with the additions into the gradient buckets. It
reads its micro-batch and the gradient of the loss from buffers that stay, and leaves its sums in others. No collective
is captured: a micro-batch in which ranks communicate (the last one, whose backward reduces buckets, and with ZeRO-1 the
first one, whose forward gathers parameters) runs kernel by kernel.

The first step runs as a whole without the graph: it is the warm-up that torch asks for, in which libraries and
autograd's nodes are set up on the stream of the capture. So this stream is that of the whole run (`own_stream`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatronish.model.batch import MicroBatch
from megatronish.parallel.pipeline.executor import ChunkForward, Executor, Observer, add_sum
from megatronish.parallel.schedules.plan import Action

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes down what a function has the device do, without doing it; the result does it, every time it is called."""


def own_stream(device: torch.device) -> None:
    """Make the current stream of this thread one that can be captured, which CUDA's default stream cannot."""
    torch.cuda.set_stream(torch.cuda.Stream(device))


def record_on_cuda(work: Callable[[], None]) -> Callable[[], None]:
    """Capture on the current stream. Calls of other threads (the loader, checkpoints, NCCL) do not end the capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    return graph.replay


class MicroBatchGraph:
    """Forward and backward of micro-batches that have the shapes of the first one."""

    def __init__(self, forward: ChunkForward, batch: MicroBatch, record: Record) -> None:
        self._forward = forward
        # Buffers of the graph: what it reads, and, once it is recorded, the sums that it writes.
        self._batch = batch.clone()
        self._loss_gradient = torch.zeros((), device=batch.tokens.device)
        self._sums: Mapping[str, Tensor] = {}
        self._replay = record(self._compute)

    def _compute(self) -> None:
        loss, self._sums = self._forward(None, self._batch, step=0)  # steps name dropout alone, and there is none
        torch.autograd.backward((loss,), (self._loss_gradient.to(loss.dtype),))

    def fits(self, batch: MicroBatch) -> bool:
        """Whether a micro-batch has the shapes of the buffers."""
        return self._batch.shapes == batch.shapes

    def run(self, batch: MicroBatch, *, loss_gradient: float) -> Mapping[str, Tensor]:
        """Add the gradients of a micro-batch. The sums are buffers, which the next run overwrites."""
        self._batch.copy_(batch)
        self._loss_gradient.fill_(loss_gradient)
        self._replay()
        return self._sums


@dataclass
class ReplayingExecutor:
    """An executor of one stage and one chunk that replays the micro-batches in which nothing is sent.

    `first` and `last`: whether these two communicate, and run without the graph.
    """

    executor: Executor
    record: Record
    first: bool
    last: bool
    _num_runs: int = field(default=0, init=False)
    _graph: MicroBatchGraph | None = field(default=None, init=False)

    def run(
        self,
        actions: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        *,
        step: int | None,
        loss_gradient: float = 1.0,
        begin_action: Callable[[Action, bool], None] = lambda _action, _is_last: None,
        observers: Sequence[Observer] = (),
    ) -> dict[str, Tensor]:
        """As `Executor.run`; evaluation, observed steps and the first step are run by it."""
        self._num_runs += step is not None
        if step is None or observers or self._num_runs == 1:
            return self.executor.run(
                actions,
                micro_batches,
                step=step,
                loss_gradient=loss_gradient,
                begin_action=begin_action,
                observers=observers,
            )
        totals: dict[str, Tensor] = {}
        end = len(micro_batches) - 1
        for number, batch in enumerate(micro_batches):

            def begin(action: Action, _is_last: bool, number: int = number) -> None:
                begin_action(action._replace(micro_batch=number), number == end)

            if not self._is_replayed(number, end=end, batch=batch):
                plan = [Action("F", 0, 0), Action("B", 0, 0)]
                sums = self.executor.run(plan, [batch], step=step, loss_gradient=loss_gradient, begin_action=begin)
            else:
                # Nothing of a replay is sent, so nothing in it is final either: `finish_reduction` sends what is left.
                begin_action(Action("B", 0, number), False)
                sums = dict(self._graph_of(batch).run(batch, loss_gradient=loss_gradient))
            for name, value in sums.items():
                add_sum(totals, name, value)
        return totals

    def _is_replayed(self, number: int, *, end: int, batch: MicroBatch) -> bool:
        sends = (self.first and number == 0) or (self.last and number == end)
        return not sends and (self._graph is None or self._graph.fits(batch))

    def _graph_of(self, batch: MicroBatch) -> MicroBatchGraph:
        if self._graph is None:
            self._graph = MicroBatchGraph(self.executor.chunks[0], batch, self.record)
        return self._graph
