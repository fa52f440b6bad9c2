"""Schedules of learning rate and weight decay: pure functions of the samples consumed before a step.

Progress is counted in samples, as Megatron-LM's scheduler counts it, so a resumed run needs to know `consumed_samples`
alone. A length given in steps is the samples that so many first steps consume: steps x global batch size, or fewer
where the run begins with smaller batches (Megatron-LM refuses such lengths with a ramp-up). The first step
has consumed none: with warm-up it uses `lr_warmup_init` (0 by default), as Megatron's does, and the step that has
consumed all of the warm-up is the first to use `lr`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.optim.batch_size import batch_sizes_of

Curve = Callable[[float], float]
"""A function from progress (0 to 1) to the fraction of the learning rate that is left (1 to 0)."""

DECAYS: dict[str, Curve] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning rate and weight decay as functions of consumed samples; all lengths are in samples."""

    config: OptimizerConfig
    lr: float
    warmup_samples: float
    decay_samples: int
    wsd_samples: int
    """Length of the last part of WSD; 0 for other styles."""
    train_samples: int
    """Length of the run, over which weight decay goes from its start to its end."""

    def __post_init__(self) -> None:
        config = self.config
        if not 0 <= config.min_lr <= self.lr:
            raise UserError(f"min_lr={config.min_lr} must be between 0 and lr={self.lr}; lower it")
        if config.lr_warmup_init > self.lr:
            raise UserError(f"lr_warmup_init={config.lr_warmup_init} must not be above lr={self.lr}; lower it")
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise UserError(
                f"warm-up of {self.warmup_samples:g} samples must be shorter than the decay of {self.decay_samples}; "
                "lower --lr-warmup-iters, or train for longer"
            )
        if config.lr_decay_style == "WSD" and not 0 < self.wsd_samples <= self.decay_samples:
            raise UserError(
                f"lr_decay_style=WSD decays over its last {self.wsd_samples} samples, which must be between 1 and "
                f"{self.decay_samples}; give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )
        if config.weight_decay_incr_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            raise UserError(
                f"weight_decay_incr_style=constant cannot go from {self.start_weight_decay} to "
                f"{self.end_weight_decay}; use --weight-decay-incr-style linear or cosine"
            )

    @property
    def start_weight_decay(self) -> float:
        """Weight decay that the first step uses."""
        start = self.config.start_weight_decay
        return self.config.weight_decay if start is None else start

    @property
    def end_weight_decay(self) -> float:
        """Weight decay from the last step on."""
        end = self.config.end_weight_decay
        return self.config.weight_decay if end is None else end

    @property
    def decoupled(self) -> "LearningRateSchedule | None":
        """Schedule of word embedding and output layer: the same shape between other rates; None without such rates."""
        config = self.config
        if config.decoupled_lr is None:
            return None
        min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
        return replace(self, config=replace(config, min_lr=min_lr, decoupled_lr=None), lr=config.decoupled_lr)

    def learning_rate(self, consumed_samples: int) -> float:
        """Learning rate of the step that starts after `consumed_samples`."""
        config = self.config
        if 0 < self.warmup_samples >= consumed_samples:
            return config.lr_warmup_init + (self.lr - config.lr_warmup_init) * consumed_samples / self.warmup_samples
        if config.lr_decay_style == "constant":
            return self.lr
        if consumed_samples > self.decay_samples:
            return config.min_lr
        if config.lr_decay_style == "inverse-square-root":
            return max(config.min_lr, self.lr * math.sqrt(max(self.warmup_samples, 1) / max(consumed_samples, 1)))
        if config.lr_decay_style == "WSD":
            curve, start = DECAYS[config.lr_wsd_decay_style], float(self.decay_samples - self.wsd_samples)
        else:
            curve, start = DECAYS[config.lr_decay_style], self.warmup_samples
        progress = max(0.0, consumed_samples - start) / (self.decay_samples - start)
        return config.min_lr + curve(progress) * (self.lr - config.min_lr)

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the step that starts after `consumed_samples`."""
        style = self.config.weight_decay_incr_style
        if style == "constant" or consumed_samples > self.train_samples:
            return self.end_weight_decay
        left = DECAYS[style](consumed_samples / self.train_samples)
        return self.end_weight_decay + left * (self.start_weight_decay - self.end_weight_decay)


def build_learning_rate_schedule(
    optimizer: OptimizerConfig, training: TrainingConfig, *, global_batch_size: int
) -> LearningRateSchedule:
    """Schedule of a run; UserError where its parts do not fit together.

    Each length may be given in steps or in samples, whichever the run itself is given in. Steps become the samples that
    they consume: while the batch grows, fewer than steps x global batch size.
    """
    if optimizer.lr is None:
        raise UserError("lr is not given; add --lr, 3e-4 for example")
    consumed = batch_sizes_of(training, global_batch_size=global_batch_size).consumed_samples
    train_samples = training.train_samples or consumed(training.train_iters or 0)
    if train_samples < 1:
        raise UserError("the length of the run is not given; add --train-iters, --train-samples or --num-epochs")
    decay_steps = optimizer.lr_decay_iters or training.train_iters or 0
    decay_samples = optimizer.lr_decay_samples or consumed(optimizer.lr_decay_iters or 0) or train_samples
    if optimizer.lr_warmup_fraction is None:
        warmup_samples: float = optimizer.lr_warmup_samples or consumed(optimizer.lr_warmup_iters or 0)
    else:
        warmup_samples = optimizer.lr_warmup_fraction * decay_samples
    wsd_samples = 0
    if optimizer.lr_decay_style == "WSD":
        # The last steps of the decay; more steps than the decay has are left to be refused.
        wsd_steps = optimizer.lr_wsd_decay_iters or 0
        last = consumed(max(decay_steps, wsd_steps)) - consumed(max(decay_steps - wsd_steps, 0))
        wsd_samples = optimizer.lr_wsd_decay_samples or last
    return LearningRateSchedule(
        config=optimizer,
        lr=optimizer.lr,
        warmup_samples=warmup_samples,
        decay_samples=decay_samples,
        wsd_samples=wsd_samples,
        train_samples=train_samples,
    )
