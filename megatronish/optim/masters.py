"""Masters, the fp32 parameter shards that an optimizer updates, and the protocol of an update rule.

A new optimizer is a class that implements `Update`, in a file of its own, and a line in `OPTIMIZERS` of optimizer.py
and in `OPTIMIZER_NAMES` of core/names.py; or a plug-in (docs/PLUGINS.md).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.parallel.disk import chunks_of, disk_of, streamed, zeros_beside
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard, Sharding


@dataclass(frozen=True)
class Masters:
    """The fp32 shards that one rank updates, each a parameter with its gradient.

    `shardings` are those of all trainable parameters of this stage, the same on every rank of the axes of `domains`;
    this rank may have no shard of some. Collectives over these axes work on `device`; masters may be on the CPU.

    Masters on a disk have no gradient of their own where `gradients` are on a GPU: who updates them copies parts.
    """

    parameters: Mapping[str, nn.Parameter]
    shards: Mapping[str, Shard]
    shardings: Mapping[str, Sharding]
    domains: Mapping[str, Domain]
    device: torch.device
    decays_qk_norms: bool = False
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def gradient_of(self, name: str) -> Tensor:
        """The gradient of a master, wherever it is."""
        gradient = self.gradients.get(name, self.parameters[name].grad)
        assert gradient is not None
        return gradient

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
        """One update of every master from its gradient."""
        ...


class _Stepped(NamedTuple):
    """What one call of a torch.optim.Optimizer updates: masters or parts of them, each with its states and gradient."""

    inner: torch.optim.Optimizer
    masters: list[nn.Parameter]
    states: list[dict[str, Tensor]]
    gradients: list[Tensor]

    def start_after(self, num_steps: int) -> None:
        """Set the step counters: torch has one for each parameter, apex one for each group, SGD none."""
        for group in self.inner.param_groups:
            group["step"] = num_steps
        for master, state in zip(self.masters, self.states, strict=True):
            self.inner.state[master] = state | {"step": torch.tensor(float(num_steps), device=master.device)}

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update; gradients on another device than the masters are copied for it."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        fetched = [master.grad is None for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            if master.grad is None:
                master.grad = gradient.to(master.device)
        self.inner.step()
        for master, is_copy in zip(self.masters, fetched, strict=True):
            if is_copy:
                master.grad = None

    @property
    def written(self) -> list[Tensor]:
        """The tensors that a step changes."""
        return [
            tensor for pair in zip(self.masters, self.states, strict=True) for tensor in (pair[0], *pair[1].values())
        ]


class TorchUpdate:
    """An update by torch.optim.Optimizers, which `make` builds from groups with and without weight decay.

    One updates all masters that lie in memory. Masters on a disk are updated in chunks, each by an optimizer of its
    own: the same bits (`chunks_of`), and no more in memory than the chunks that are read, computed with and written.
    """

    state_names: ClassVar[tuple[str, ...]]

    @classmethod
    def described(cls, _masters_on: torch.device, /) -> str:
        """The name of the class, for one that says no more."""
        return cls.__name__

    def __init__(self, masters: Masters, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        self.parameters = masters.parameters
        self.state = states_of(self.parameters, self.state_names)
        self._make, self._all = make, masters
        self.stepped = [self._of(parts) for parts in _divided(self.parameters)]
        self.start_after(0)

    def _of(self, parts: Sequence[tuple[str, slice | None]]) -> _Stepped:
        """What updates these parts of masters, or where there is no part the whole ones."""
        masters, states, gradients, decays = list[nn.Parameter](), list[dict[str, Tensor]](), list[Tensor](), []
        for name, part in parts:
            master, gradient, state = self.parameters[name], self._all.gradient_of(name), self.state[name]
            if part is not None:
                master, gradient = nn.Parameter(master.detach().view(-1)[part]), gradient.view(-1)[part]
                state = {key: tensor.view(-1)[part] for key, tensor in state.items()}
                master.grad = gradient if gradient.device == master.device else None
            masters.append(master)
            states.append(state)
            gradients.append(gradient)
            decays.append(self._all.decays(name))
        groups = [
            {"params": chosen, "decays": decaying}
            for decaying in (True, False)
            if (chosen := [master for master, each in zip(masters, decays, strict=True) if each == decaying])
        ]
        return _Stepped(self._make(groups), masters, states, gradients)

    def start_after(self, num_steps: int) -> None:
        """Set the step counters."""
        for each in self.stepped:
            each.start_after(num_steps)

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update; weight decay applies to the masters that decay."""
        for number in streamed([each.written for each in self.stepped], writes=True):
            self.stepped[number].step(learning_rate=learning_rate, weight_decay=weight_decay)


def states_of(parameters: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """States of zeros, {parameter: {state: tensor}}, each where the master is."""
    keys = [(name, state) for name in parameters for state in names]
    zeros = zeros_beside([parameters[name] for name, _ in keys])
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for (name, state), tensor in zip(keys, zeros, strict=True):
        states[name][state] = tensor
    return states


def _divided(parameters: Mapping[str, Tensor]) -> list[list[tuple[str, slice | None]]]:
    """What is updated together: all masters in memory, and parts of those on a disk chunk by chunk."""
    in_memory = [name for name, master in parameters.items() if disk_of(master) is None]
    names = [name for name in parameters if name not in set(in_memory)]
    chunks = chunks_of([parameters[name].numel() for name in names])
    divided: list[list[tuple[str, slice | None]]] = [[(name, None) for name in in_memory]] if in_memory else []
    return divided + [[(names[part.number], slice(part.begin, part.end)) for part in chunk] for chunk in chunks]
