"""AdamW and SGD by fused kernels: of torch, or of NVIDIA apex for AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101).

apex's AdamW is used where it is installed and the masters are on CUDA. It keeps the same two states as torch's under
the same names, so a checkpoint written with one resumes with the other.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.optim.masters import Masters, TorchUpdate


class FusedAdamChoice(NamedTuple):
    """apex's FusedAdam, or None where torch's AdamW is used, and the reason."""

    fused_adam: Callable[..., torch.optim.Optimizer] | None
    reason: str


class AdamW(TorchUpdate):
    """Adam with decoupled weight decay, over fp32 masters on one device."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, masters: Masters, config: OptimizerConfig) -> None:
        devices = {master.device for master in masters.parameters.values()}
        assert len(devices) <= 1, "masters of one rank live in one place"
        super().__init__(masters, partial(adamw, config=config, masters_on=next(iter(devices), masters.device)))

    @staticmethod
    def described(masters_on: torch.device, /) -> str:
        """The kernel that steps masters on this device, with the reason."""
        choice = find_fused_adam(masters_on)
        return f"{'torch' if choice.fused_adam is None else 'apex'}'s fused AdamW ({choice.reason})"


def adamw(groups: list[dict[str, Any]], *, config: OptimizerConfig, masters_on: torch.device) -> torch.optim.Optimizer:
    """The optimizer of these parameter groups; learning rate and weight decay are set before each step."""
    given: dict[str, Any] = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    fused_adam = find_fused_adam(masters_on).fused_adam
    if fused_adam is None:
        return torch.optim.AdamW(groups, **given, fused=True)
    return fused_adam(groups, **given, adam_w_mode=True)


def find_fused_adam(masters_on: torch.device) -> FusedAdamChoice:
    """The choice of kernel for masters on this device."""
    if masters_on.type != "cuda":
        return FusedAdamChoice(None, "masters are on the CPU")
    try:
        fused_adam = import_module("apex.optimizers").FusedAdam
        import_module("amp_C")  # its kernels, an extension that apex may have been built without
    except ModuleNotFoundError as error:
        return FusedAdamChoice(None, f"there is no module {error.name} of NVIDIA apex")
    except Exception as error:  # a broken build, or the other package that is called apex
        return FusedAdamChoice(None, f"NVIDIA apex does not import: {type(error).__name__}: {error}")
    if not (isinstance(fused_adam, type) and issubclass(fused_adam, torch.optim.Optimizer)):
        return FusedAdamChoice(None, "apex.optimizers.FusedAdam is no optimizer: this is not NVIDIA's apex")
    return FusedAdamChoice(fused_adam, "masters are on CUDA")


# Stochastic gradient descent with momentum, by torch's fused kernel.


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
