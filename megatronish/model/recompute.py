"""What does a backward compute again instead of having kept it?

The backward of a recomputed piece runs its forward once more from the inputs that were kept. Random masks are functions
of their names (streams.py), so the second forward draws what the first drew, and there is no generator to put back.
The kept inputs may be shared by the ranks of tp, which all hold the same (ZeRO-R's activation partitioning,
Rajbhandari et al. 2020, arXiv:1910.02054, section 6.1), and may wait in the CPU's memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatronish import comm
from megatronish.mesh import Axis


@dataclass(frozen=True)
class Recompute:
    """What is computed again: see config/recompute.py. `shard_axis` has one rank unless kept inputs are shared."""

    granularity: Literal["selective", "full"] | None = None
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    shard_axis: Axis = field(default_factory=partial(Axis, "tp"))
    offload: bool = False

    def groups(self, layers: Sequence[str]) -> list[tuple[Sequence[str], bool]]:
        """The layers in order, in pieces that are computed again as one (True) or keep their activations (False)."""
        if self.granularity != "full":
            return [(layers, False)]
        if self.method == "block":
            again, kept = layers[: self.num_layers], layers[self.num_layers :]
            return [*(([layer], True) for layer in again), (kept, False)]
        size = self.num_layers
        return [(layers[first : first + size], True) for first in range(0, len(layers), size)]


def recompute(run: Callable[..., Tensor], *inputs: Tensor, how: Recompute | None = None) -> Tensor:
    """run(*inputs), of which nothing but the inputs is kept for the backward. `how` says where they are kept."""
    if not torch.is_grad_enabled():  # nor does anything have to be put away
        return run(*inputs)
    return _Recompute.apply(run, how or Recompute(), *inputs)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], how: Recompute, *inputs: Tensor) -> Tensor:
        ctx.run, ctx.kept = run, [_SavedInput(x.shape, x.device, _is_shared(x, how), how.shard_axis) for x in inputs]
        ctx.save_for_backward(*(_put_away(x, how) for x in inputs))
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = [kept.take(x).detach().requires_grad_() for kept, x in zip(ctx.kept, ctx.saved_tensors, strict=True)]
        with torch.enable_grad():
            y = ctx.run(*inputs)
        torch.autograd.backward(y, grads[0])
        return None, None, *(x.grad for x in inputs)


class _SavedInput(NamedTuple):
    """How an input comes back."""

    shape: torch.Size
    device: torch.device
    is_shared: bool
    shard_axis: Axis

    def take(self, x: Tensor) -> Tensor:
        x = x.to(self.device, non_blocking=True)
        if self.is_shared:
            x = comm.start_all_gather(x, self.shard_axis).wait()
        return x.view(self.shape)


def _is_shared(x: Tensor, how: Recompute) -> bool:
    return how.shard_axis.size > 1 and x.numel() % how.shard_axis.size == 0


def _put_away(x: Tensor, how: Recompute) -> Tensor:
    """What is kept of x: a copy where it is a part of it, as a view would keep the whole."""
    if _is_shared(x, how):
        x = comm.piece_of(x.reshape(-1), how.shard_axis).clone()
    if how.offload:
        away = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return away.copy_(x, non_blocking=True)
    return x
