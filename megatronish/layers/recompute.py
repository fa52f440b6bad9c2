"""Activation recomputation (checkpointing): the backward runs a forward once more from its saved inputs.

Random masks are functions of their names (streams.py), so the second forward draws what the first drew, and no state of
a generator is saved. The saved inputs may be cut over the ranks of tp, which all hold the same (ZeRO-R's activation
partitioning, Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1), and may be offloaded to the CPU's memory.

`recompute` computes a part of a model again with its graph, `recompute_rows` one that takes each row by itself, a few
rows at a time. `restoring` computes tensors alone, which a cheap part has
made and a later layer would keep as its input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatronish.config.sections.training import RecomputeConfig, RecomputeModule
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


class Recompute(NamedTuple):
    """What is computed again, by the config. Saved inputs are cut over `shard_axis`, if it has ranks."""

    config: RecomputeConfig = RecomputeConfig()
    shard_axis: Axis = Axis("tp")


def recompute(
    run: Callable[..., Tensor], *inputs: Tensor, how: Recompute | None = None, learns: bool = False
) -> Tensor:
    """run(*inputs), of which only the inputs are saved for the backward. `how` says where they are saved.

    `learns` says that `run` has parameters that learn: then there is a backward even where all before it is frozen.
    """
    if torch.compiler.is_compiling():
        return run(*inputs)  # inside one graph the compiler chooses what it computes again
    if not torch.is_grad_enabled() or not (learns or any(x.requires_grad for x in inputs)):
        return run(*inputs)
    if not any(x.requires_grad for x in inputs):
        # Autograd sees the inputs and not the parameters: without a gradient to compute it would make no node.
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
    return _Recompute.apply(run, how or Recompute(), *inputs)


def recompute_module(module: nn.Module, x: Tensor, *context: Any) -> Tensor:
    """module(x, *context), of which only x is saved for the backward."""
    learns = any(parameter.requires_grad for parameter in module.parameters())
    return recompute(lambda x: module(x, *context), x, learns=learns)


PIECE = 1 << 20
"""Elements of the rows that are computed again at once."""


def recompute_rows(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """run(x), [..., in] -> [..., out], of which only x is saved: a function of each row by itself, without parameters.

    What it makes on its way is small in the forward, too, as it sees a few rows at a time.
    """
    return run(x) if torch.compiler.is_compiling() else _RecomputeRows.apply(run, x)


class _RecomputeRows(torch.autograd.Function):
    """Forward of pieces of rows without a graph, and a backward that makes the graph of each and goes through it."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        first, *others = pieces = _pieces(x)
        y = run(first)
        if others:
            whole = y.new_empty(x.numel() // x.shape[-1], y.shape[-1])
            for piece, rows in zip(pieces, whole.split(len(first)), strict=True):
                rows.copy_(y if piece is first else run(piece))
            y = whole
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        pieces, dy = _pieces(x), grads[0].flatten(0, -2)
        size = len(pieces[0])
        for piece, of_output, into in zip(pieces, dy.split(size), dx.view(-1, x.shape[-1]).split(size), strict=True):
            own = piece.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(own)
            into.copy_(torch.autograd.grad(y, own, of_output)[0])
        return None, dx


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """[..., in] -> rows [n, in], a few in each piece; the last may have fewer."""
    return x.flatten(0, -2).split(max(1, PIECE // x.shape[-1]))


class _Recompute(torch.autograd.Function):
    """Forward without a graph, and a backward that makes the graph and goes through it at once."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], how: Recompute, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.saved_inputs = [_SavedInput(x.shape, x.device, _is_shared(x, how), how.shard_axis) for x in inputs]
        ctx.save_for_backward(*(_saved_part(x, how) for x in inputs))
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # 1. The inputs as the forward had them: brought back from the CPU, gathered over tp. They start a new graph.
        gradients: dict[int, Tensor] = {}
        restored = [saved.restore(x) for saved, x in zip(ctx.saved_inputs, ctx.saved_tensors, strict=True)]
        # 2. The forward again, this time with a graph.
        with torch.enable_grad():
            inputs = [_Input.apply(x.detach().requires_grad_(), gradients, i) for i, x in enumerate(restored)]
            y = ctx.run(*inputs)
        # 3. Backward through it: parameters, and queues of deferred weight gradients, receive their terms.
        torch.autograd.backward(y, grads[0])
        return None, None, *(gradients.get(i) for i in range(len(inputs)))


class _Input(torch.autograd.Function):
    """Identity whose backward puts the gradient into `gradients`, as it is.

    A leaf's `grad` would be a copy with the strides of the leaf, and what sums a copy may sum in another order: then
    the backward before this one would not be, in every bit, that of a forward that is not computed again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: dict[int, Tensor], number: int) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.gradients[ctx.number] = grads[0]
        return None, None, None


class _SavedInput(NamedTuple):
    """How a saved input is restored: its shape, its device, and the axis it was cut over."""

    shape: torch.Size
    device: torch.device
    is_shared: bool
    shard_axis: Axis

    def restore(self, x: Tensor) -> Tensor:
        x = x.to(self.device, non_blocking=True)
        if self.is_shared:
            x = comm.start_all_gather(x, self.shard_axis).wait()
        return x.view(self.shape)


def _is_shared(x: Tensor, how: Recompute) -> bool:
    return how.shard_axis.size > 1 and x.numel() % how.shard_axis.size == 0


def _saved_part(x: Tensor, how: Recompute) -> Tensor:
    """The part of x that is saved: a copy where it is not the whole, as a view would keep the whole alive."""
    if _is_shared(x, how):
        x = comm.piece_of(x.reshape(-1), how.shard_axis).clone()
    if how.config.offload_saved_activations:
        offloaded = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return offloaded.copy_(x, non_blocking=True)
    return x


class HasParts(nn.Module):
    """Module with parts that --recompute-modules names; `recomputed` are those that it computes again."""

    recomputed: frozenset[RecomputeModule] = frozenset()


def recompute_parts(model: nn.Module, parts: frozenset[RecomputeModule]) -> None:
    """From now on the modules of a model compute these parts again in the backward, and keep the others."""
    for module in model.modules():
        if isinstance(module, HasParts):
            module.recomputed = parts


def restoring(
    tensors: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]], *, really: bool = True
) -> AbstractContextManager[None]:
    """Context in which the results of `compute` are not kept for a backward, which computes them again, with no graph.

    `tensors` are these results. What is kept in their place is what `compute` holds. Views of them count as them.
    With `really` False, and in a graph of torch.compile, which chooses for itself, everything is kept.
    """
    if not really or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    return _restoring(tensors, compute)


@contextmanager
def _restoring(tensors: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    again = _Again(compute)
    places = {_storage(tensor): place for place, tensor in enumerate(tensors)}

    def pack(x: Tensor) -> "Tensor | _Restored":
        place = places.get(_storage(x))
        if place is None:
            return x
        again.num_waiting += 1
        return _Restored(again, place, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(kept: "Tensor | _Restored") -> Tensor:
        return kept.tensor() if isinstance(kept, _Restored) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _storage(x: Tensor) -> int:
    """The number of the memory that x is a view of, which a fake tensor has, too."""
    return x.untyped_storage()._cdata


class _Again:
    """Tensors that are computed again when the first of them is asked for, and kept until the last one was."""

    def __init__(self, compute: Callable[[], Sequence[Tensor]]) -> None:
        self.compute, self.num_waiting = compute, 0
        self._tensors: Sequence[Tensor] | None = None

    def take(self, place: int) -> Tensor:
        if self._tensors is None:
            with torch.no_grad():
                self._tensors = self.compute()
        tensor = self._tensors[place]
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self._tensors = None
        return tensor


class _Restored(NamedTuple):
    """What is kept in the place of a tensor: how it lies in the memory of one that is computed again."""

    again: _Again
    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.again.take(self.place).as_strided(self.shape, self.strides, self.offset)
