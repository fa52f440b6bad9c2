"""The optimizer of a rank: fp32 masters and the update rule of --optimizer, for any compute precision."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.core.names import OPTIMIZER_NAMES, options_of
from megatronish.optim.fused import SGD, AdamW
from megatronish.optim.masters import Masters, Update
from megatronish.optim.muon import Muon
from megatronish.parallel.mesh import Domain
from megatronish.parallel.sharding import Shard, Sharding

OPTIMIZERS: dict[str, type[Update]] = {"adam": AdamW, "sgd": SGD, "muon": Muon}
"""The optimizers of --optimizer, under the names of `OPTIMIZER_NAMES`, which has their memory and their options."""


Rate = Literal["usual", "vocabulary", "lora_b", "hidden"]
"""Which learning rate a parameter has: --lr, --decoupled-lr, --loraplus-lr-ratio times --lr, or --lr / w of muP."""


def _rate_of(sharding: Sharding, config: OptimizerConfig, width_mult: float) -> Rate:
    if width_mult != 1.0 and sharding.role in OPTIMIZER_NAMES[config.optimizer].divided_by_width:
        return "hidden"
    if sharding.is_vocabulary and config.decoupled_lr is not None:
        return "vocabulary"
    return "lora_b" if sharding.role == "lora_b" and config.loraplus_lr_ratio is not None else "usual"


def optimizer_line(config: OptimizerConfig, masters_on: torch.device) -> str:
    """The implementation that updates masters on this device, with the reason."""
    described: Callable[[torch.device], str] | None = getattr(OPTIMIZERS[config.optimizer], "described", None)
    return described(masters_on) if described is not None else config.optimizer  # a plug-in's function has no more


class Optimizer:
    """Updates the fp32 masters of this rank's shards; the data-parallel part copies them into the model."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, Tensor],
        shardings: Mapping[str, Sharding],
        domains: Mapping[str, Domain],
        config: OptimizerConfig,
        *,
        device: torch.device,
        width_mult: float = 1.0,
    ) -> None:
        """`gradients` are those of the trainable masters, in the masters' shapes; each step reads these tensors.

        `shardings` are those of every trainable parameter of the stage, whether or not this rank has a part of it.
        `width_mult` is the w of muP, by which the learning rate of hidden matrices is divided.
        """
        self.shards, self.name = shards, config.optimizer
        masters = {name: nn.Parameter(shards[name].master) for name in shards if name in gradients}
        for name, master in masters.items():
            if gradients[name].device == master.device:
                master.grad = gradients[name]
        self.masters = masters
        whole = Masters(masters, shards, shardings, domains, device, config.apply_wd_to_qk_layernorm, gradients)
        options = options_of(OPTIMIZER_NAMES, config.optimizer, config.optimizer_args)
        kind: Callable[..., Update] = OPTIMIZERS[config.optimizer]
        make = partial(kind, **options)
        # Parameters that have a learning rate of their own have an update rule of their own.
        self.loraplus_lr_ratio, self.width_mult = config.loraplus_lr_ratio, width_mult
        by_rate: dict[Rate, set[str]] = {"usual": set()}
        for name, sharding in shardings.items():
            by_rate.setdefault(_rate_of(sharding, config, width_mult), set()).add(name)
        self.updates = {rate: make(whole.only(names), config) for rate, names in by_rate.items()}
        self.state = {name: state for update in self.updates.values() for name, state in update.state.items()}
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Number of steps taken, as Adam's bias correction counts them."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for update in self.updates.values():
            update.start_after(value)

    @property
    def divides(self) -> bool:
        """Whether every update rule can divide the gradients as it reads them; those of plug-ins cannot."""
        return all(getattr(update, "divides", False) for update in self.updates.values())

    def step(
        self,
        *,
        learning_rate: float,
        weight_decay: float,
        decoupled_learning_rate: float | None = None,
        momentum: float | None = None,
        divisor: float = 1.0,
    ) -> None:
        """One update of every master from its gradient. Every rank of the stage calls it, even one without masters.

        `decoupled_learning_rate` is that of word embedding and output layer, with --decoupled-lr. `momentum` is given
        where it cycles. Where the optimizer `divides`, gradients are divided by `divisor` first, and stay so.
        """
        self._num_steps += 1
        rates: dict[Rate, float] = {"usual": learning_rate, "hidden": learning_rate / self.width_mult}
        if decoupled_learning_rate is not None:  # 0 is a rate: that of the first step of a warm-up
            rates["vocabulary"] = decoupled_learning_rate
        if self.loraplus_lr_ratio is not None:
            rates["lora_b"] = learning_rate * self.loraplus_lr_ratio
        assert rates.keys() >= self.updates.keys(), "--decoupled-lr has a schedule of its own"
        further = {} if momentum is None else {"momentum": momentum}  # plug-ins without a momentum take none
        if divisor != 1.0:
            further["divisor"] = divisor
        for rate, update in self.updates.items():
            update.step(learning_rate=rates[rate], weight_decay=weight_decay, **further)
