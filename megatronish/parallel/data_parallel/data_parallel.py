"""Data parallelism as the engine sees it: what every stage of ZeRO has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard


class DataParallel(Protocol):
    """Parameters and gradients of one rank's stage, shared with other data ranks as a stage of ZeRO says.

    `shards` is what this rank keeps of each parameter for the optimizer, `gradients` the gradients of these elements,
    complete between `wait_for_offload` and the next `zero`. Both lack parameters of which it keeps nothing, and
    `gradients` the frozen ones (`requires_grad` is False). `counted` names the parameters of `shards` that this rank
    counts where every element must count once over `counting_axes` of its domain and pp (replicas count it, too).
    """

    domains: Mapping[str, Domain]
    shards: dict[str, Shard]
    gradients: dict[str, Tensor]
    counted: set[str]

    @property
    def sums(self) -> dict[nn.Parameter, Tensor]:
        """Buffer in which the gradient of each parameter adds up, where it is kept whole (stages 0 and 1)."""
        ...

    @property
    def sum_of(self) -> Callable[[nn.Parameter], Tensor] | None:
        """Where a layer may add the gradient of a parameter itself, from stage 2 on None."""
        ...

    def zero(self) -> None:
        """Begin a step: every gradient is zero."""
        ...

    def begin_action(self, action: tuple[str, int, int], is_last: bool) -> None:
        """(kind, chunk, micro-batch) comes next, and is the last one of its kind in its chunk or not."""
        ...

    def weight_gradient_ready(self, parameter: nn.Parameter) -> None:
        """The W action at work has added all that it adds to this gradient."""
        ...

    def finish_reduction(self) -> None:
        """Returns once every gradient is summed over all that it must be summed over."""
        ...

    def counted_gradients(self) -> Mapping[str, list[Tensor]]:
        """Flat tensors with the gradients that this rank counts, and zeros, by domain."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply every gradient of this rank by `factor`."""
        ...

    def wait_for_offload(self) -> None:
        """Returns once the gradients are where the optimizer reads them."""
        ...

    def gather_parameters(self, *, frozen: bool = False) -> None:
        """Round the masters into the model, on every rank; where they were loaded, the `frozen` ones too."""
        ...

    def wait_for_parameters(self) -> None:
        """Returns once the parameters that `gather_parameters` has rounded are there, for who reads them outside."""
        ...

    def gather_before(self, module: nn.Module, names: Sequence[str]) -> None:
        """From now on the module's forward begins by waiting for these parameters."""
        ...
