"""Devices of an operator's tensors in a dry run: what a GPU would refuse is refused.

Tensors without memory meet more freely than those of a GPU: next to tensors on a device they take any tensor of no
dimension on the CPU, as torch takes a number. torch does that where a kernel computes element by element and is handed
such a tensor as a number. Elsewhere (stack, cat, foreach, norms, fused optimizers, our own operators) it raises, or
reads the CPU's memory by a pointer of the device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Between devices; and those that move, or make a number of, a tensor without dimensions.
MOVING = {aten.copy_, aten._to_copy, aten.copy, aten._foreach_copy_, aten.set_, aten._pin_memory, aten.is_pinned}
TAKES_NUMBERS = {aten.where, aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # indices on the CPU are copied
RANDOM_STATE = "attention"  # SDPA's seed and offset are numbers on the CPU, which its backward is given back


def refuse_mixed_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """RuntimeError if an operator has tensors of several devices and torch's kernels would not take them."""
    tensors = list(_tensors((args, kwargs)))
    devices = {each.device for each in tensors}
    packet = func._overloadpacket
    if len(devices) < 2 or func.namespace in ("c10d", "prim") or packet in MOVING:
        return
    if packet in INDEXED and args[0].device.type != "cpu":
        others = [args[0], *args[2:3]]
        if len({each.device for each in others if isinstance(each, Tensor) and each.dim()}) == 1:
            return
    numbers = [each for each in tensors if each.dim() == 0 and each.device.type == "cpu"]
    rest = {each.device for each in tensors if not any(each is number for number in numbers)}
    if len(rest) == 1 and _takes_numbers(func, args, numbers):
        return
    shapes = ", ".join(f"{tuple(each.shape)} on {each.device}" for each in tensors)
    raise RuntimeError(f"{func} of tensors on several devices, which a GPU refuses: {shapes}")


def _takes_numbers(func: Any, args: tuple[Any, ...], numbers: list[Tensor]) -> bool:
    """Whether these tensors without dimensions stand where a kernel takes a number."""
    packet, name = func._overloadpacket, func._overloadpacket.__name__
    if RANDOM_STATE in name and func.namespace == "aten":
        return True
    if name.startswith("_foreach_"):  # of two lists, each element with its own; a tensor that is in no list is a number
        return func._overloadname == "Tensor" and all(any(each is arg for arg in args) for each in numbers)
    is_written = name.endswith("_") and any(args[0] is each for each in numbers)
    return (torch.Tag.pointwise in func.tags or packet in TAKES_NUMBERS) and not is_written


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))
