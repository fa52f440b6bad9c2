"""What is stochastic gradient descent with momentum here? torch's fused kernel."""

import torch

from megatronish.config.optimizer import OptimizerConfig
from megatronish.optim.masters import Masters, TorchUpdate


class SGD(TorchUpdate):
    """Its weight decay is not decoupled: it goes through the momentum, as in torch."""

    state_names = ("momentum_buffer",)

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        super().__init__(
            masters, lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        )

    @staticmethod
    def described(_masters_on: torch.device, /) -> str:
        """There is one."""
        return "torch's fused SGD"
