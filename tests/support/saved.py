"""Measurement of the bytes saved for backward, by saved-tensor hooks, each storage once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Saved:
    """Storages that autograd keeps, other than the parameters' own."""

    def __init__(self, *own: Tensor) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._storages: dict[int, int] = {}

    def see(self, tensor: Tensor) -> Tensor:
        """A pack hook that changes nothing. What is kept stays alive, so its address stays its own."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(self._storages.values())


@contextmanager
def saved_by(model: nn.Module, *others: Tensor) -> Iterator[Saved]:
    """Watches what a forward keeps, besides the parameters and `others`."""
    saved = Saved(*model.parameters(), *others)
    with torch.autograd.graph.saved_tensors_hooks(saved.see, lambda tensor: tensor):
        yield saved
