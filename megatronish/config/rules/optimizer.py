"""Rules on learning rate, momentum and weight decay over the steps of a run."""

from megatronish.config.config import Config
from megatronish.config.conflicts import SAMPLES, STEPS
from megatronish.config.rules.rule import ConfigRule
from megatronish.core.names import OPTIMIZER_NAMES


def _warm_up(config: Config) -> str | None:
    training, optimizer = config.training, config.optimizer
    iters = (optimizer.lr_decay_iters, optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters)
    samples = (optimizer.lr_decay_samples, optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples)
    counts = (("iters", training.train_iters, *iters), ("samples", training.train_samples, *samples))
    for unit, run, decay, warm_up, wsd in counts:
        whole_name, whole = (f"lr_decay_{unit}", decay) if decay is not None else (f"train_{unit}", run)
        if whole is None:
            continue
        if warm_up >= whole:
            return (
                f"lr_warmup_{unit}={warm_up} must be less than {whole_name}={whole}; "
                f"use a shorter warm-up, for example --lr-warmup-fraction 0.1"
            )
        if wsd is not None and wsd > whole:
            return (
                f"lr_wsd_decay_{unit}={wsd} must not exceed {whole_name}={whole}; "
                f"use --lr-wsd-decay-{unit} {whole} or less"
            )
    return None


def _wsd(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD" or optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples:
        return None
    unit = "samples" if config.training.train_samples is not None else "iters"
    return f"lr_decay_style=WSD needs the length of its last part; add --lr-wsd-decay-{unit}"


def _momentum_cycle(config: Config) -> str | None:
    optimizer = config.optimizer
    low, high = optimizer.cycle_min_momentum, optimizer.cycle_max_momentum
    if low is None and high is None:
        if optimizer.momentum_tail_growth == 0:
            return None
        return (
            f"momentum_tail_growth={optimizer.momentum_tail_growth} needs a momentum that cycles; add "
            "--cycle-min-momentum and --cycle-max-momentum"
        )
    if low is None or high is None:
        return "a momentum that cycles has two ends; add both --cycle-min-momentum and --cycle-max-momentum"
    if low > high:
        return (
            f"cycle_min_momentum={low} must not exceed cycle_max_momentum={high}; exchange them: the momentum is "
            "lowest at the peak of the learning rate"
        )
    if optimizer.lr_decay_style not in FALLING:
        return (
            f"cycle_min_momentum={low} needs a learning rate that falls after its peak, and "
            f"lr_decay_style={optimizer.lr_decay_style} does not; use --lr-decay-style {', '.join(FALLING)}"
        )
    if not OPTIMIZER_NAMES[optimizer.optimizer].has_momentum:
        able = ", ".join(name for name, choice in OPTIMIZER_NAMES.items() if choice.has_momentum)
        return f"cycle_min_momentum={low} needs an optimizer whose momentum can be set; --optimizer has {able}"
    return None


def _learning_rates(config: Config) -> str | None:
    optimizer = config.optimizer
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(optimizer, name)
        if optimizer.lr is not None and value > optimizer.lr:
            return f"{name}={value} must not exceed lr={optimizer.lr}; use a smaller one, or a larger --lr"
    return None


def _decoupled_learning_rates(config: Config) -> str | None:
    optimizer = config.optimizer
    peak, least = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if peak is None:
        if least is None:
            return None
        return f"decoupled_min_lr={least} needs the rate that decays to it; add --decoupled-lr, or use --min-lr"
    end = ("min_lr", optimizer.min_lr) if least is None else ("decoupled_min_lr", least)
    for name, value in (end, ("lr_warmup_init", optimizer.lr_warmup_init)):
        if value > peak:
            remedy = "add --decoupled-min-lr" if name == "min_lr" else "use a smaller one"
            return f"{name}={value} must not exceed decoupled_lr={peak}; {remedy}, or a larger --decoupled-lr"
    return None


def _weight_decay(config: Config) -> str | None:
    optimizer = config.optimizer
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    if style == "constant":
        if (start, end) == (None, None):
            return None
        return (
            f"start_weight_decay={start}, end_weight_decay={end} need a weight_decay_incr_style other than constant; "
            "add --weight-decay-incr-style linear or cosine, or use --weight-decay alone"
        )
    if start is None or end is None:
        return f"weight_decay_incr_style={style} needs both ends; add --start-weight-decay and --end-weight-decay"
    return None


_MEASURES = ("qk_clip", "log_max_attention_logit")


def _largest_logits(config: Config) -> str | None:
    asked = {"qk_clip": config.optimizer.qk_clip, "log_max_attention_logit": config.log.log_max_attention_logit}
    name = next((name for name, value in asked.items() if value), None)
    if name is None:
        return None
    model = config.model
    if model.has_encoder:
        return f"{name} is for models without an encoder, and not for model_type={model.model_type}; leave it out"
    if model.block != "transformer":
        return f"{name} knows the attention of block=transformer, and not that of block={model.block}; leave it out"
    return None


def _qk_clip(config: Config) -> str | None:
    if not config.optimizer.qk_clip:
        return None
    model = config.model
    if config.adapter.is_used:
        return "qk_clip changes weights of queries and keys, which are frozen under adapters; leave one of them out"
    norm = next((name for name in ("qk_layernorm", "qk_l2_norm") if getattr(model, name)), None)
    if norm is not None and not model.multi_latent_attention:
        return f"qk_clip changes weights before a norm, and {norm} would undo it; leave one of them out"
    return None


FALLING = ("linear", "cosine", "WSD")
"""Styles of decay that go from a peak to min_lr, so that a momentum can go the opposite way."""

LENGTH_RULES = (
    ConfigRule((*STEPS, *SAMPLES), _warm_up),
    ConfigRule(("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"), _wsd),
)

RATE_RULES = (
    ConfigRule(("lr", "min_lr", "lr_warmup_init"), _learning_rates),
    ConfigRule(("decoupled_lr", "decoupled_min_lr", "min_lr", "lr_warmup_init"), _decoupled_learning_rates),
    ConfigRule(
        ("cycle_min_momentum", "cycle_max_momentum", "momentum_tail_growth", "lr_decay_style", "optimizer"),
        _momentum_cycle,
    ),
)

WEIGHT_DECAY_RULES = (ConfigRule(("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"), _weight_decay),)

CLIP_RULES = (
    ConfigRule((*_MEASURES, "model_type", "block"), _largest_logits),
    ConfigRule(("qk_clip", "lora_rank", "qk_layernorm", "qk_l2_norm", "multi_latent_attention"), _qk_clip),
)
