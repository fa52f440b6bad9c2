"""Matrix product of a linear layer, exchangeable: its forward, the gradient of its input, the gradient of its weight.

The layers of linear.py own everything around the product: weights and their sharding, collectives and their overlap
with computation, deferral of weight gradients (weight_gradients.py). A `Product` owns the arithmetic on what one rank
holds. Another precision (fp8), another form of the weight (4-bit blocks) or another kind of product (one weight an
expert) is another `Product`. `linear.set_products` gives a model's layers their products; engine/build.py is where a
flag would ask for them.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel.sharding import Sharding


class Product(Protocol):
    """y = x W^T + b on one rank, and its two gradients. Shapes: x [..., in], y and dy [..., out], W [out, in], b [out].

    `weight` is the parameter as the layer holds it and is handed through untouched: only the product reads its values,
    so it may be stored in any form, which `stored` describes. A product may hold state of its own (scales, statistics):
    `set_products` can give every layer one of its own. A product that depends on one forward (offsets of tokens sorted
    by expert) is made for that forward and handed to `linear`: its backward, deferred or not, uses the same object.

    A frozen weight (`requires_grad` False) has no weight gradient, and x is not kept for it.
    """

    def stored(self, weight: Sharding) -> Sharding:
        """Sharding of the layer's weight in the form in which the product reads it: by default as it is."""
        return weight

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in], [out, in], [out] -> [..., out]. The bias is included because most products add it for free."""
        ...

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., out], [out, in] -> [..., in]: dy W, a new contiguous tensor, which the layer may reduce in place."""
        ...

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """[..., out], [..., in] -> [out, in]: dy^T x. None where the product learns nothing."""
        ...

    def add_weight_gradient(self, to: GradientSum, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to an fp32 sum [out, in], for layers that do not hand it to autograd."""
        gradient = self.weight_gradient(dy, x)
        if gradient is None:
            to.filled()
        else:
            to.add(gradient)


class DenseProduct(Product):
    """Product in the precision of its operands, as `torch.nn.functional.linear` computes it."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in], [out, in], [out] -> [..., out]: one matrix product with the bias in its epilogue."""
        return F.linear(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """[..., out], [out, in] -> [..., in]: dy W."""
        return dy @ weight

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """[..., out], [..., in] -> [out, in]: dy^T x, in one product over all tokens."""
        return dy.flatten(0, -2).t() @ x.flatten(0, -2)

    def add_weight_gradient(self, to: GradientSum, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to the sum in place; on a CPU a product in half precision is rounded first, as by autograd."""
        to.add_product(dy.flatten(0, -2).t(), x.flatten(0, -2))


DENSE = DenseProduct()
"""Product of every layer until `set_products` chooses another. It has no state, so all layers share it."""
