"""Weight gradients that layers add to the sums of a step themselves: at once (`SumOf`), or deferred to W actions.

At once: a layer that is given a `SumOf` adds its weight gradient to the sum in its backward, and hands autograd none.
The product accumulates where it writes, so no second tensor as large as the weight is made, written and read again; of
a token embedding only the rows of the batch are touched, where autograd makes a gradient of the whole table.

Deferred: the backward of a matrix product has two halves. The stage before waits for the gradient of the input. No
stage needs the gradient of the weight until the step ends. Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241)
move this second half to where a stage would idle: the backward of a linear layer that was given a `WeightGradients`
appends the operands of its weight gradient to the queue, and the W action of the same chunk and micro-batch computes
it. The gradients of biases, norms and embeddings are cheap and are computed in the backward, by autograd.

Until then the queue holds dy and x of every linear layer: about as much memory as the activations took.
"""

from collections import Counter, deque
from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatronish.layers.product import Product
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

SumOf = Callable[[nn.Parameter], GradientSum]
"""Where the gradient of a parameter adds up over the micro-batches of a step. It gives the memory for it, too, and who
asks adds to it."""


class AddsInPlace(nn.Module):
    """Layer whose backward adds the gradient of its weight to the sum itself, where it is given `sum_of`."""

    sum_of: SumOf | None = None


def add_in_place(model: nn.Module, sum_of: SumOf) -> None:
    """From now on the model's linear layers and token embedding add their weight gradients to the sums themselves."""
    for layer in model.modules():
        if isinstance(layer, AddsInPlace):
            layer.sum_of = sum_of


class DeferredProduct(NamedTuple):
    """Operands of a weight gradient dy^T x that is not computed yet: x is gathered over `axis` along the sequence."""

    weight: nn.Parameter
    dy: Tensor
    x: Tensor
    axis: Axis
    product: Product


def _ignore(_weight: nn.Parameter) -> None:
    """Default of `delivered`: no caller waits for a weight."""


class WeightGradients:
    """Deferred weight gradients of one rank, by chunk and micro-batch.

    They are added to `sum_of` each weight, fp32 for weights of any precision. `delivered` is called with each weight to
    which a W action has added all that it adds.
    """

    def __init__(self, sum_of: SumOf, *, delivered: Callable[[nn.Parameter], None] = _ignore) -> None:
        self._sum_of, self._delivered = sum_of, delivered
        self._pending: dict[tuple[int, int], deque[DeferredProduct]] = {}
        self._filling: tuple[int, int] | None = None

    @property
    def pending(self) -> Set[tuple[int, int]]:
        """The (chunk, micro-batch) of backwards whose weight gradients are not computed yet."""
        return self._pending.keys()

    def fill(self, *, chunk: int, micro_batch: int) -> None:
        """Open the queue of this chunk and micro-batch: the backward that follows defers into it."""
        self._filling = (chunk, micro_batch)
        self._pending[self._filling] = deque()

    def defer(self, weight: nn.Parameter, dy: Tensor, x: Tensor, *, axis: Axis, product: Product) -> None:
        """Keep dy [S, B, out] and x [S, B, in] (cut over `axis`: [S/size, B, in]) until the W action."""
        assert self._filling is not None, "a weight gradient was deferred outside of a pipeline's backward"
        self._pending[self._filling].append(DeferredProduct(weight, dy, x, axis, product))

    @torch.no_grad()
    def compute(self, *, chunk: int, micro_batch: int) -> None:
        """Add all that is pending of this backward to the sums, in its order.

        While one weight gradient is computed, the x of the next one is gathered.
        """
        pending = self._pending.pop((chunk, micro_batch))
        uses = Counter(each.weight for each in pending)
        gathering = comm.start_all_gather(pending[0].x, pending[0].axis) if pending else None
        while gathering is not None:
            weight, dy, _, _, product = pending.popleft()
            x = gathering.wait()  # [S, B, in]
            gathering = comm.start_all_gather(pending[0].x, pending[0].axis) if pending else None
            product.add_weight_gradient(self._sum_of(weight), dy, x)
            uses[weight] -= 1
            if not uses[weight]:
                self._delivered(weight)
