"""Adapter of a linear layer: what is added to its output, or multiplies it, and learns in the place of its weight.

A layer has an adapter for each of its sections (q, k, v; gate, up), as if each were a layer by itself. Of the parts of
an adapter, the one that lies like the layer's weight is cut like it. The other part behaves as the bias of a
row-parallel layer does: it is whole on every rank, and under sequence parallelism its gradient is partial over tp, for
it meets this rank's own positions alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from megatronish.ops.grouped_mm import Groups


class InputDropout(Protocol):
    """Dropout on the inputs of a transformer layer's adapters, in one forward of training."""

    def of_input(self, x: Tensor, *, site: str, rate: float, first_column: int = 0, is_whole: bool = False) -> Tensor:
        """[s, B, in] -> [s, B, in]: columns from `first_column` on of the global input.

        x holds this rank's own positions, or with `is_whole` those of all tp ranks.
        """
        ...


class Adapter(Protocol):
    """Adapter of a column-parallel or row-parallel layer."""

    def scaled_input(self, x: Tensor, /) -> Tensor:
        """The layer's input as the layer is to see it."""
        ...

    def __call__(self, x: Tensor, y: Tensor, drop: InputDropout | None, /) -> Tensor:
        """The layer's output y, reduced and with its bias, adapted; x is the layer's input."""
        ...


class GroupedAdapter(Protocol):
    """Adapter of a layer of experts: one for each expert that this rank holds."""

    def scaled_input(self, x: Tensor, groups: Groups, /) -> Tensor:
        """The rows as the layer is to see them."""
        ...

    def __call__(self, x: Tensor, y: Tensor, groups: Groups, /) -> Tensor:
        """The layer's output y, adapted. x are the layer's rows, sorted by expert."""
        ...


class Adaptable(nn.Module):
    """Layer that may have adapters, by their names, of which the one called `active_adapter` is applied.

    `section_names` name the parts of its output that an adapter is for.
    """

    section_names: tuple[str, ...] = ()
    active_adapter: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict()

    @property
    def adapter(self) -> Any:
        """The adapter that is applied: an `Adapter`, of experts a `GroupedAdapter`, or None."""
        name = self.active_adapter
        return self.adapters[name] if name is not None and name in self.adapters else None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters, as a context; those that were applied before are applied again afterwards."""
    layers = [module for module in model.modules() if isinstance(module, Adaptable)]
    before = [layer.active_adapter for layer in layers]
    select_adapter(model, None)
    try:
        yield
    finally:
        for layer, name in zip(layers, before, strict=True):
            layer.active_adapter = name


def select_adapter(model: nn.Module, name: str | None) -> None:
    """From now on the model's linear layers apply the adapter of this name, those that have it; None: no adapter."""
    for module in model.modules():
        if isinstance(module, Adaptable):
            module.active_adapter = name
