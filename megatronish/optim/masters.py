"""Masters, the fp32 parameter shards that an optimizer updates, and the protocol of an update rule.

A new optimizer is a class that implements `Update`, in a file of its own, and a line in `OPTIMIZERS` of optimizer.py
and in `OPTIMIZER_NAMES` of core/names.py; or a plug-in (docs/PLUGINS.md).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard, Sharding


@dataclass(frozen=True)
class Masters:
    """The fp32 shards that one rank updates, each a parameter with its gradient.

    `shardings` are those of all trainable parameters of this stage, the same on every rank of the axes of `domains`;
    this rank may have no shard of some. Collectives over these axes work on `device`; masters may be on the CPU.
    """

    parameters: Mapping[str, nn.Parameter]
    shards: Mapping[str, Shard]
    shardings: Mapping[str, Sharding]
    domains: Mapping[str, Domain]
    device: torch.device
    decays_qk_norms: bool = False

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to a master."""
        sharding = self.shardings[name]
        return sharding.decays or (self.decays_qk_norms and sharding.role == "qk_norm")

    def only(self, names: Collection[str]) -> "Masters":
        """The masters and shardings of these names alone."""
        return replace(
            self,
            parameters={name: each for name, each in self.parameters.items() if name in names},
            shardings={name: each for name, each in self.shardings.items() if name in names},
        )

    def by_domain(self) -> Iterator[tuple["Masters", Domain]]:
        """The masters of each reduction domain that has any parameter in this stage, with the domain."""
        for domain in self.domains.values():
            names = [name for name, sharding in self.shardings.items() if sharding.domain == domain.name]
            if names:
                yield self.only(names), domain


class Update(Protocol):
    """An update rule over masters. `state` is its state by parameter and state name, in the shape of the master."""

    state: dict[str, dict[str, Tensor]]

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None: ...

    @staticmethod
    def described(masters_on: torch.device, /) -> str:
        """The implementation for masters on this device, with the reason: for the first lines of a run."""
        ...

    def start_after(self, num_steps: int) -> None:
        """Continue after `num_steps` steps; the tensors of `state` have been filled in place, or are zeros."""
        ...

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every master from its gradient.

        One with `has_momentum` (core/names.py) also takes `momentum`, or None for that of the config.
        """
        ...


class TorchUpdate:
    """An update by a torch.optim.Optimizer, which `make` builds from the two groups with and without weight decay."""

    state_names: ClassVar[tuple[str, ...]]

    @classmethod
    def described(cls, _masters_on: torch.device, /) -> str:
        """The name of the class, for one that says no more."""
        return cls.__name__

    def __init__(self, masters: Masters, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self.parameters = masters.parameters
        groups = [
            {"params": parameters, "decays": decays}
            for decays in (True, False)
            if (parameters := [master for name, master in self.parameters.items() if masters.decays(name) == decays])
        ]
        self.inner = make(groups) if groups else None
        self.state = {
            name: {state: torch.zeros_like(master, requires_grad=False) for state in self.state_names}
            for name, master in self.parameters.items()
        }
        self.start_after(0)

    def start_after(self, num_steps: int) -> None:
        """Set the step counters: torch has one for each parameter, apex one for each group, SGD none."""
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["step"] = num_steps
        for name, master in self.parameters.items():
            self.inner.state[master] = self.state[name] | {"step": torch.tensor(float(num_steps), device=master.device)}

    def step(self, *, learning_rate: float, weight_decay: float, momentum: float | None = None) -> None:
        """One update; weight decay applies to the masters that decay. The momentum is Adam's beta1, or SGD's."""
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
            if momentum is not None:
                group.update({"betas": (momentum, group["betas"][1])} if "betas" in group else {"momentum": momentum})
        self.inner.step()
