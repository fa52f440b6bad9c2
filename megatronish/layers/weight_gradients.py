"""How are weight gradients put off, and computed later? A queue between the backward of linear layers and W actions.

The backward of a matrix product has two halves. The gradient of its input is what the stage before waits for; the
gradient of its weight is needed by nobody until the step ends. Zero-bubble schedules (Qi et al. 2023,
arXiv:2401.10241) move the second half to where a stage would idle: the backward of a linear layer that was given a
`WeightGradients` leaves there what its weight gradient is computed from, and the W action of the same chunk and
micro-batch computes it. Biases, norms and embeddings are cheap and get theirs in the backward, from autograd.

Until then the queue holds dy and x of every linear layer: about as much as the activations took.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatronish import comm
from megatronish.mesh import Axis


class Entry(NamedTuple):
    """A product y = x W^T whose weight gradient dy^T x is due: x is gathered over `axis` along the sequence first."""

    weight: nn.Parameter
    dy: Tensor
    x: Tensor
    axis: Axis


def _ignore(_weight: nn.Parameter) -> None:
    """Nobody asked."""


class WeightGradients:
    """The weight gradients of one rank that are due, by chunk and micro-batch.

    They are added to `sums`, fp32 for weights of any precision. `delivered` is told each weight to which a W action
    has added all that it adds.
    """

    def __init__(
        self, sums: Mapping[nn.Parameter, Tensor], *, delivered: Callable[[nn.Parameter], None] = _ignore
    ) -> None:
        self._sums, self._delivered = sums, delivered
        self._due: dict[tuple[int, int], deque[Entry]] = {}
        self._filling: tuple[int, int] | None = None

    @property
    def due(self) -> Set[tuple[int, int]]:
        """The (chunk, micro-batch) of backwards whose weight gradients are not yet computed."""
        return self._due.keys()

    def fill(self, *, chunk: int, micro_batch: int) -> None:
        """The backward that follows is this one's."""
        self._filling = (chunk, micro_batch)
        self._due[self._filling] = deque()

    def defer(self, weight: nn.Parameter, dy: Tensor, x: Tensor, *, axis: Axis) -> None:
        """dy [S, B, out] and x [S, B, in] (cut over `axis`: [S/size, B, in]) are kept until the W action."""
        assert self._filling is not None, "a weight gradient was put off outside of a pipeline's backward"
        self._due[self._filling].append(Entry(weight, dy, x, axis))

    @torch.no_grad()
    def compute(self, *, chunk: int, micro_batch: int) -> None:
        """Add all that is due of this backward, in its order. While one is computed the next one's x is gathered."""
        due = self._due.pop((chunk, micro_batch))
        uses = Counter(entry.weight for entry in due)
        gathering = comm.start_all_gather(due[0].x, due[0].axis) if due else None
        while gathering is not None:
            weight, dy, _, _ = due.popleft()
            x = gathering.wait()
            gathering = comm.start_all_gather(due[0].x, due[0].axis) if due else None
            _add_product(self._sums[weight], dy.flatten(0, -2), x.flatten(0, -2))
            uses[weight] -= 1
            if not uses[weight]:
                self._delivered(weight)


def _add_product(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """total [out, in] += dy [S B, out]^T x [S B, in]; a product in bf16 is rounded first, as autograd's is."""
    if dy.dtype == total.dtype:
        total.addmm_(dy.t(), x)
    else:
        total.add_(dy.t() @ x)


@runtime_checkable
class CanSplit(Protocol):
    """A module whose backward can leave weight gradients for later."""

    weight_gradients: WeightGradients | None


def split_backward(model: nn.Module, weight_gradients: WeightGradients | None) -> None:
    """From now on the model's linear layers put their weight gradients off to there (None: they do not)."""
    for module in model.modules():
        if isinstance(module, CanSplit):
            module.weight_gradients = weight_gradients


def deferrable_weights(model: nn.Module) -> set[str]:
    """The names of the weights of linear layers: once backward is split their gradients arrive in W actions."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CanSplit)}
    names = {f"{name}.weight".removeprefix(".") for name in layers}
    return names & {name for name, _ in model.named_parameters(remove_duplicate=False)}
