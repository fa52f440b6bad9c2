"""How do gradients move parameters? The optimizer over a rank's fp32 masters, whatever the model computes in."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatronish.config.optimizer import OptimizerConfig
from megatronish.sharding import Shard, Sharding


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
    """Steps the fp32 masters of this rank's shards; what becomes of them in the model is the data axis's part."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        config: OptimizerConfig,
    ) -> None:
        """`gradients` are those of the masters that learn, of the same shapes; each step reads them there."""
        self.state_names = STATE_NAMES[config.optimizer]
        self.shards = shards
        self.masters = {name: nn.Parameter(shard.master) for name, shard in shards.items() if name in gradients}
        for name, master in self.masters.items():
            master.grad = gradients[name]
        groups = [
            {"params": masters, "decays": decays}
            for decays in (True, False)
            if (masters := [master for name, master in self.masters.items() if shardings[name].decays == decays])
        ]
        self.inner = OPTIMIZERS[config.optimizer](groups, config) if groups else None
        self.state: dict[str, dict[str, Tensor]] = {
            name: {state: torch.zeros_like(master) for state in self.state_names}
            for name, master in self.masters.items()
        }
        self.num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps taken, as Adam's bias correction counts them."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for name, master in self.masters.items():
            assert self.inner is not None
            step = {"step": torch.tensor(float(value), device=master.device)} if "exp_avg" in self.state_names else {}
            self.inner.state[master] = self.state[name] | step

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every master from its gradient."""
        self._num_steps += 1
        if self.inner is None:
            return
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.inner.step()
