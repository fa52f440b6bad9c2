"""Masters, the fp32 values that an optimizer steps, and the protocol of an optimizer.

A new optimizer is a class that has what `Update` asks for, in a file of its own, and a line in `OPTIMIZERS` of
optimizer.py.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatronish.config.optimizer import OptimizerConfig
from megatronish.mesh import Domain
from megatronish.sharding import Shard, Sharding


@dataclass(frozen=True)
class Masters:
    """The fp32 values that one rank steps, each a parameter with its gradient; of some names this rank has nothing.

    `shardings` are of all parameters that learn in this stage, the same on every rank of the axes of `domains`. What
    these axes send lives on `device`; masters themselves may live on the CPU.
    """

    parameters: Mapping[str, nn.Parameter]
    shards: Mapping[str, Shard]
    shardings: Mapping[str, Sharding]
    domains: Mapping[str, Domain]
    device: torch.device

    def only(self, names: Collection[str]) -> "Masters":
        """Those of these names."""
        return replace(
            self,
            parameters={name: each for name, each in self.parameters.items() if name in names},
            shardings={name: each for name, each in self.shardings.items() if name in names},
        )

    def by_domain(self) -> Iterator[tuple["Masters", Domain]]:
        """The masters of each reduction domain that has any parameter of this stage."""
        for domain in self.domains.values():
            names = [name for name, sharding in self.shardings.items() if sharding.domain == domain.name]
            if names:
                yield self.only(names), domain


class Update(Protocol):
    """How some masters are stepped. `state` is what it keeps for them, by name, each in the shape of the master."""

    state: dict[str, dict[str, Tensor]]

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None: ...

    @staticmethod
    def described(masters_on: torch.device, /) -> str:
        """What steps masters that live there, and why it and no other: for the first lines of a run."""
        ...

    def start_after(self, num_steps: int) -> None:
        """So many steps lie behind: `state` was filled, or is all zeros."""
        ...

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every master from its gradient."""
        ...


class TorchUpdate:
    """What is stepped by an optimizer of torch's kind, which `make` builds for groups of parameters."""

    state_names: ClassVar[tuple[str, ...]]

    def __init__(self, masters: Masters, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self.parameters = masters.parameters
        groups = [
            {"params": parameters, "decays": decays}
            for decays in (True, False)
            if (
                parameters := [
                    each for name, each in self.parameters.items() if masters.shardings[name].decays == decays
                ]
            )
        ]
        self.inner = make(groups) if groups else None
        self.state = {
            name: {state: torch.zeros_like(each, requires_grad=False) for state in self.state_names}
            for name, each in self.parameters.items()
        }
        self.start_after(0)

    def start_after(self, num_steps: int) -> None:
        """torch counts the steps of each parameter, apex those of a group, SGD none."""
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["step"] = num_steps
        for name, each in self.parameters.items():
            self.inner.state[each] = self.state[name] | {"step": torch.tensor(float(num_steps), device=each.device)}

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Matrices decay, norms and biases do not."""
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.inner.step()
