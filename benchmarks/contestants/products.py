"""Matrix-product peak: the products of the model's linear layers and nothing else, in the layout's processes.

No contestant, but it takes its turns as one, so that its FLOPs per second are those of the same minutes. Operands and
results are allocated beforehand; every rank computes on the rows of one micro-batch.
"""

import torch
from torch import Tensor

from benchmarks.contestants.case import Job, State


class Products:
    """Forward, gradient of the input and gradient of the weight of every linear layer."""

    num_parameters = 0

    def __init__(self, job: Job) -> None:
        case, sizes = job.case, job.case.sizes
        width, self.num_layers = sizes.hidden_size, sizes.num_layers
        rows = case.micro_batch_size * sizes.seq_length
        shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width), (width, sizes.vocab_size)]
        *self.block, self.head = (self._operands(rows, n, m, case.dtype) for n, m in shapes)

    @staticmethod
    def _operands(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x, weight and dy of a layer, then room for y, dx and the gradient of the weight."""
        shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
        x, weight, dy = (torch.randn(shape).to(dtype) for shape in shapes)
        return x, weight, dy, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)

    @torch.no_grad()
    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """The products of one micro-batch."""
        for layer in [*self.block * self.num_layers, self.head]:
            x, weight, dy, y, dx, dw = layer
            torch.mm(x, weight.T, out=y)
            torch.mm(dy, weight, out=dx)
            torch.mm(dy.T, x, out=dw)
        return None


def build(job: Job, _state: State) -> Products:
    """The products on this rank."""
    return Products(job)
