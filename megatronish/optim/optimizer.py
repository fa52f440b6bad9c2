"""How do gradients move parameters? The optimizer over fp32 masters, whatever precision the model computes in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatronish.config.optimizer import OptimizerConfig
from megatronish.sharding import Sharding


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), torch's fused kernel."""
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adam": _adamw,
    "sgd": _sgd,
}
"""The optimizers of --optimizer."""

STATE_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""What each keeps for every element of a parameter."""


class Optimizer:
    """Steps fp32 masters (the parameters themselves where they are fp32) and copies them into the model.

    `gradients` are the fp32 gradients of the parameters, by name.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        gradients: dict[str, Tensor],
        shardings: dict[str, Sharding],
        config: OptimizerConfig,
    ) -> None:
        self.parameters = parameters
        self.state_names = STATE_NAMES[config.optimizer]
        self.masters: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            master: Tensor = parameter
            if parameter.dtype != torch.float32:
                master = nn.Parameter(parameter.detach().float())
            master.grad = gradients[name]
            self.masters[name] = master
        decaying = [name for name in parameters if shardings[name].decays]
        others = [name for name in parameters if not shardings[name].decays]
        groups = [
            {"params": [self.masters[name] for name in names], "decays": decays}
            for names, decays in ((decaying, True), (others, False))
            if names
        ]
        self.inner = OPTIMIZERS[config.optimizer](groups, config)
        for master in self.masters.values():
            self.inner.state[master] = {state: torch.zeros_like(master) for state in self.state_names}
        self.num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps taken, as Adam's bias correction counts them."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        if "exp_avg" in self.state_names:
            for master in self.masters.values():
                self.inner.state[master]["step"] = torch.tensor(float(value), device=master.device)

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every parameter from its gradient."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.inner.step()
        self._num_steps += 1
        self.copy_masters()

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Round the masters into the model, where they are apart."""
        pairs = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        if pairs:
            parameters, masters = (list(side) for side in zip(*pairs, strict=True))
            torch._foreach_copy_(parameters, masters)

    def take_masters(self) -> None:
        """Begin from what the model holds (after loading weights alone)."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    self.masters[name].copy_(parameter)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By parameter: the optimizer's tensors, and the master where it is not the parameter itself."""
        found = {}
        for name, master in self.masters.items():
            tensors = {state: self.inner.state[master][state] for state in self.state_names}
            if master is not self.parameters[name]:
                tensors["master"] = master.detach()
            found[name] = tensors
        return found
