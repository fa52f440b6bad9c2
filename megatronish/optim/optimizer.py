"""The optimizer over a rank's fp32 masters, whatever precision the model computes in."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatronish.config.optimizer import OptimizerConfig
from megatronish.mesh import Domain
from megatronish.optim.adam import AdamW
from megatronish.optim.masters import Masters, Update
from megatronish.optim.muon import Muon
from megatronish.optim.sgd import SGD
from megatronish.sharding import Shard, Sharding

OPTIMIZERS: dict[str, type[Update]] = {"adam": AdamW, "sgd": SGD, "muon": Muon}
"""The optimizers of --optimizer."""


def optimizer_line(config: OptimizerConfig, masters_on: torch.device) -> str:
    """What steps masters that live there, and why it and no other."""
    return OPTIMIZERS[config.optimizer].described(masters_on)


class Optimizer:
    """Steps the fp32 masters of this rank's shards; what becomes of them in the model is the data axis's part."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        domains: Mapping[str, Domain],
        config: OptimizerConfig,
        *,
        device: torch.device,
    ) -> None:
        """`gradients` are those of the masters that learn, of the same shapes; each step reads them there.

        `shardings` are of every parameter of the stage that learns, whether or not this rank has a part of it.
        """
        self.shards, self.name = shards, config.optimizer
        masters = {name: nn.Parameter(shards[name].master) for name in shards if name in gradients}
        for name, master in masters.items():
            master.grad = gradients[name]
        self.masters = masters
        self.update = OPTIMIZERS[config.optimizer](Masters(masters, shards, shardings, domains, device), config)
        self.state = self.update.state
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps taken, as Adam's bias correction counts them."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        self.update.start_after(value)

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every master from its gradient. Every rank of the stage takes part, whatever it has."""
        self._num_steps += 1
        self.update.step(learning_rate=learning_rate, weight_decay=weight_decay)
