"""Lion, an optimizer (Chen et al. 2023, arXiv:2302.06675): steps by the sign of an interpolated momentum.

    python pretrain_gpt.py --plugin examples/plugins/lion.py --optimizer lion --optimizer-args beta1=0.95 ...

The paper takes a third to a tenth of Adam's learning rate, and three to ten times its weight decay.
"""

import torch

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.masters import Masters
from megatronish.plugins import register_optimizer


class Lion:
    """An update rule: `masters` are this rank's fp32 parts of parameters, whatever ZeRO and tp have cut."""

    def __init__(self, masters: Masters, _config: OptimizerConfig, *, beta1: float, beta2: float) -> None:
        self.masters, self.betas = masters, (beta1, beta2)
        # What checkpoints keep, by parameter and name, each in the shape of its master.
        self.state = {
            name: {"exp_avg": torch.zeros_like(master, requires_grad=False)}
            for name, master in masters.parameters.items()
        }

    @staticmethod
    def described(_masters_on: torch.device, /) -> str:
        """A word for the first lines of a run."""
        return "Lion"

    def start_after(self, num_steps: int) -> None:
        """Called after a resume, with `state` filled in. Lion counts no steps."""

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """One update of every master from its gradient."""
        for name, master in self.masters.parameters.items():
            gradient, momentum = master.grad, self.state[name]["exp_avg"]
            assert gradient is not None
            if self.masters.shardings[name].decays:
                master.mul_(1 - learning_rate * weight_decay)
            master.sub_(momentum.lerp(gradient, 1 - self.betas[0]).sign_(), alpha=learning_rate)
            momentum.lerp_(gradient, 1 - self.betas[1])


# `moments`: one number in addition to each master, which the expected memory counts.
register_optimizer("lion", Lion, moments=1, options={"beta1": 0.9, "beta2": 0.99})
