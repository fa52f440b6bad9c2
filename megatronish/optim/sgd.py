"""Stochastic gradient descent with momentum, by torch's fused kernel."""

import torch

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.masters import Masters, TorchUpdate


class SGD(TorchUpdate):
    """SGD with momentum; its weight decay is not decoupled: it is part of the gradient, as in torch."""

    state_names = ("momentum_buffer",)

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        super().__init__(
            masters, lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        )

    @staticmethod
    def described(_masters_on: torch.device, /) -> str:
        """The kernel, the same for all devices."""
        return "torch's fused SGD"
