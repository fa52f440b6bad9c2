"""Offloaded gradients: copies in the CPU's memory, where masters live and the optimizer steps them.

On CUDA the copies go through pinned memory and no rank waits for them one by one: they start as soon as gradients are
summed, run while the norm is taken and agreed upon, and are waited for together. The way back, masters into the model,
is not waited for at all: what computes next on the device comes after it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatronish.parallel.pinned import Form, pinned_zeros


def memory_on(device: torch.device, like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of these shapes there; in memory that a GPU can copy from and to without waiting if it is the CPU's."""
    if device.type == "cpu" and any(each.device.type == "cuda" for each in like):
        return pinned_zeros([Form(tuple(each.shape), each.dtype) for each in like])
    return [torch.zeros(each.shape, dtype=each.dtype, device=device) for each in like]


class OffloadedGradients:
    """Flat gradients as the optimizer reads them: themselves, or copies of them where masters live."""

    def __init__(self, gradients: Sequence[Tensor], masters_on: torch.device | None) -> None:
        self._gradients, self._are_apart, self._factor = gradients, masters_on is not None, 1.0
        self.tensors = gradients if masters_on is None else memory_on(masters_on, gradients)

    def start(self) -> None:
        """Start to copy: the gradients are summed."""
        self._factor = 1.0
        if self._are_apart:
            for gradient, copy in zip(self._gradients, self.tensors, strict=True):
                copy.copy_(gradient, non_blocking=True)

    def scale(self, factor: float) -> None:
        """Multiply the copies, too, once they have come."""
        self._factor *= factor

    def finish(self) -> None:
        """Returns once the copies are complete."""
        if not self._are_apart:
            return
        for device in {gradient.device for gradient in self._gradients if gradient.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        if self._factor != 1.0:
            for copy in self.tensors:
                copy.mul_(self._factor)
        self._factor = 1.0
