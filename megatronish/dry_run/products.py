"""FLOPs of the products in a dry run: torch's formulas, those that it lacks, and what is a product by its name."""

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# A part of an operator's name that only matrix products, convolutions and attention have.
PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|v?dot|matmul|linear|bilinear|einsum|gemm|\w*conv(olution)?(\d?d)?|\w*attention|lstm|gru|rnn)(_|$)"
)


def grouped_flops(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Of rows by their groups, [N, k] x [E, k, n]; of sums over groups of rows, [m, N] x [N, n]; of all pairs."""
    rows = x.shape if weight.dim() == 3 else x.shape[-2:]  # [E, m, k] x [k, N]: each of the N columns has one group
    return 2 * prod(rows) * weight.shape[-1]


OWN: dict[Any, Callable[..., Any]] = {aten._grouped_mm: grouped_flops}
LIKE = {  # the same product under another name
    "_addmm_activation": "addmm",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def formula_of(packet: Any) -> Callable[..., Any] | None:
    """What counts an operator's FLOPs from its arguments; in place or not, a product has the same."""
    if (found := flop_registry.get(packet) or OWN.get(packet)) is not None:
        return found
    name = packet.__name__.removesuffix("_")
    other = LIKE.get(name, name if name != packet.__name__ else None)
    if other is None or not is_product(name) or not hasattr(aten, other):
        return None
    return flop_registry.get(getattr(aten, other))


def is_product(name: str) -> bool:
    """Whether an operator multiplies matrices, by its name: without a formula it must be reported, not counted as 0."""
    return PRODUCT.search(name) is not None
