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
from megatronish.parallel.disk import Chunk, disk_of, in_chunks, zeros_beside
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
        """One update of every master from its gradient.

        One with `has_momentum` (core/names.py) also takes `momentum`, or None for that of the config.
        """
        ...


class _Stepped(NamedTuple):
    """What one call of a torch.optim.Optimizer updates: masters or parts of them, each with its states."""

    inner: torch.optim.Optimizer
    masters: list[nn.Parameter]
    states: list[dict[str, Tensor]]

    def start_after(self, num_steps: int) -> None:
        """Set the step counters: torch has one for each parameter, apex one for each group, SGD none."""
        for group in self.inner.param_groups:
            group["step"] = num_steps
        for master, state in zip(self.masters, self.states, strict=True):
            self.inner.state[master] = state | {"step": torch.tensor(float(num_steps), device=master.device)}

    @property
    def divides(self) -> bool:
        """Whether the kernel can divide the gradients as it reads them, which takes a pass of its own elsewhere.

        On a CPU, of whose time little goes to the optimizer, gradients are multiplied in every layout alike.
        """
        fused = getattr(self.inner, "_step_supports_amp_scaling", False)  # torch's word for it
        return fused and all(master.is_cuda for master in self.masters)

    def step(self, *, learning_rate: float, weight_decay: float, momentum: float | None, divisor: float) -> None:
        """One update of all of them, from gradients that are divided by this first."""
        inner: Any = self.inner
        if divisor != 1.0:
            inner.grad_scale = torch.full((), divisor, device=self.masters[0].device)  # which fused steps read
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
            if momentum is not None:
                group.update({"betas": (momentum, group["betas"][1])} if "betas" in group else {"momentum": momentum})
        inner.step()
        if divisor != 1.0:
            del inner.grad_scale


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
        self._make, self._all, self._num_steps = make, masters, 0
        self._on_disk = [name for name, master in self.parameters.items() if disk_of(master) is not None]
        names = [name for name in self.parameters if name not in set(self._on_disk)]
        parameters = [self.parameters[name] for name in names]
        self.in_memory = self._stepped(names, parameters, [self.state[name] for name in names]) if names else None
        self.start_after(0)

    def _stepped(self, names: Sequence[str], masters: list[nn.Parameter], states: list[dict[str, Tensor]]) -> _Stepped:
        """What updates these, of the masters of these names the whole or a part."""
        groups = [
            {"params": chosen, "decays": decays}
            for decays in (True, False)
            if (chosen := [each for name, each in zip(names, masters, strict=True) if self._all.decays(name) == decays])
        ]
        return _Stepped(self._make(groups), masters, states)

    def start_after(self, num_steps: int) -> None:
        """Set the step counters."""
        self._num_steps = num_steps
        if self.in_memory is not None:
            self.in_memory.start_after(num_steps)

    @property
    def divides(self) -> bool:
        """Whether `step` takes a divisor of the gradients."""
        return not self._on_disk and (self.in_memory is None or self.in_memory.divides)

    def step(
        self, *, learning_rate: float, weight_decay: float, momentum: float | None = None, divisor: float = 1.0
    ) -> None:
        """One update; weight decay applies to the masters that decay. The momentum is Adam's beta1, or SGD's.

        Where it `divides`, the gradients are divided by `divisor` before they are used.
        """
        if self.in_memory is not None:
            self.in_memory.step(
                learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum, divisor=divisor
            )
        groups = [(self.parameters[name], *self.state[name].values()) for name in self._on_disk]
        for chunk in in_chunks(groups, num_written=1 + len(self.state_names)) if groups else ():
            stepped = self._of_chunk(chunk)
            stepped.start_after(self._num_steps)
            stepped.step(learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum, divisor=1.0)
        self._num_steps += 1

    def _of_chunk(self, chunk: Chunk) -> _Stepped:
        """What updates the parts of a chunk, with their gradients, from another device copies of them."""
        names, masters, states = list[str](), list[nn.Parameter](), list[dict[str, Tensor]]()
        for part, (master, *tensors) in chunk:
            name = self._on_disk[part.number]
            parameter = nn.Parameter(master)
            gradient = self._all.gradient_of(name).view(-1)[part.begin : part.end]
            parameter.grad = gradient.to(master.device)
            names.append(name)
            masters.append(parameter)
            states.append(dict(zip(self.state_names, tensors, strict=True)))
        return self._stepped(names, masters, states)


def states_of(parameters: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """States of zeros, {parameter: {state: tensor}}, each where the master is."""
    keys = [(name, state) for name in parameters for state in names]
    zeros = zeros_beside([parameters[name] for name, _ in keys])
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for (name, state), tensor in zip(keys, zeros, strict=True):
        states[name][state] = tensor
    return states
