"""Lazy tensors of a model whose linear weights are quantised as they are read.

A weight is read whole, or expert by expert, quantised, and forgotten: no rank holds the model in its own precision. The
scales of the second level, which are asked for after the weight, are kept until then, so that each is read once.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from megatronish.formats.weights import LazyTensor
from megatronish.layers.nf4 import NF4Weight


def quantised(
    tensors: Mapping[str, LazyTensor], weights: Iterable[tuple[str, str, NF4Weight]], *, device: torch.device
) -> dict[str, LazyTensor]:
    """The tensors, of which these `weights`, (name, name of the scales, form), are in NF4; quantised on the device."""
    found = dict(tensors)
    for name, scales, held in weights:
        if name in tensors:
            packed = _Packed(tensors[name], held, device)
            found[name] = packed.weight()
            if held.form.double:
                found[scales] = packed.scales()
    return found


class _Packed:
    """Quantisation of one weight; `_kept` are scales that are not asked for yet, by expert (0 where there is one)."""

    def __init__(self, source: LazyTensor, held: NF4Weight, device: torch.device) -> None:
        self.source, self.held, self.device = source, held, device
        self.is_stack = held.num_experts is not None
        self._kept: dict[int, Tensor] = {}

    def weight(self) -> LazyTensor:
        shape = self.held.stored_shape(self.source.shape)
        if not self.is_stack:
            return LazyTensor(shape, torch.uint8, partial(self._weight, 0))
        return self._stack(shape, self._weight)

    def scales(self) -> LazyTensor:
        width = self.held.form.scale_bytes
        if not self.is_stack:
            return LazyTensor((width,), torch.uint8, partial(self._scales, 0))
        return self._stack((self.source.shape[0], width), self._scales)

    def _stack(self, shape: tuple[int, ...], read: Callable[[int], Tensor]) -> LazyTensor:
        def part(start: int, stop: int) -> Tensor:
            return torch.stack([read(expert) for expert in range(start, stop)])

        return LazyTensor(shape, torch.uint8, lambda: part(0, shape[0]), part)

    def _weight(self, expert: int) -> Tensor:
        stored, self._kept[expert] = self._read(expert)
        return stored

    def _scales(self, expert: int) -> Tensor:
        if expert not in self._kept:
            _, self._kept[expert] = self._read(expert)
        return self._kept.pop(expert)

    def _read(self, expert: int) -> tuple[Tensor, Tensor]:
        values = self.source.rows(expert, expert + 1)[0] if self.is_stack else self.source.read()
        stored, scales = self.held.form.pack(values.to(self.device).flatten(0, -2))
        return stored.unflatten(0, values.shape[:-1]), scales
