"""Learning rate of Axolotl's config.yml over the steps: transformers' schedules, and torch's OneCycleLR."""

import math
from collections.abc import Mapping
from typing import Any

from megatronish.compat.importers.imported import Imported
from megatronish.compat.importers.values import number, section, text
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown


def learning_rate(found: Imported, values: Mapping[str, Any]) -> None:
    """Shape of the learning rate, and warm-up: of 3 % of the run, at most 100 steps, where nothing is said."""
    decay = text(values, "lr_scheduler", "cosine").removeprefix("SchedulerType.").lower()
    found.set("lr_decay_style", DECAYS.get(decay, "constant"))
    if decay not in DECAYS and decay != ONE_CYCLE:
        found.warn(
            "lr_scheduler",
            f"{decay} is not there, and the learning rate stays constant; --lr-decay-style has cosine, linear and WSD",
        )
    _end_of_decay(found, values, decay)
    # Warm-up has one length here. The default of 3 % has a bound in steps, so it needs the length of the run.
    if decay == "constant":
        if {"lr_warmup_iters", "lr_warmup_fraction"} & found.settings.keys():
            found.leave_out("warmup_steps", "lr_scheduler: constant has no warm-up there; constant_with_warmup has")
        found.settings.pop("lr_warmup_fraction", None)
        found.set("lr_warmup_iters", 0)
    elif "lr_warmup_iters" in found.settings:
        # Hugging Face's Trainer lets the steps win, and Axolotl refuses both.
        if found.settings.pop("lr_warmup_fraction", None) is not None:
            found.leave_out("warmup_ratio", "warmup_steps, which is given, counts")
    elif "lr_warmup_fraction" not in found.settings:
        if (run := found.settings.get("train_iters")) is not None:
            found.set("lr_warmup_iters", min(int(0.03 * run), 100))
        else:
            found.set("lr_warmup_fraction", 0.03)
            found.leave_out("warmup_steps", "it is absent, which means 3 % of the run there, but at most 100 steps")
    if decay == ONE_CYCLE:
        _one_cycle(found, section(values, "lr_scheduler_kwargs"))


def _one_cycle(found: Imported, options: Mapping[str, Any]) -> None:
    """torch's OneCycleLR, whose rise is the warm-up unless `pct_start` says another part of the run."""
    # 1. Both ends of the cycle are steps before the last one: they need the length of the run.
    total, peak = found.settings.get("train_iters"), found.settings.get("lr")
    if total is None or peak is None or total < 2:
        found.warn("lr_scheduler", "one_cycle needs max_steps and learning_rate; without them the rate stays constant")
        return
    steps, part = found.settings.pop("lr_warmup_iters", None), found.settings.pop("lr_warmup_fraction", 0.0)
    rise = number(options, "pct_start", within=KWARGS, least=0, most=1)
    rise = (math.ceil(part * total) if steps is None else steps) if rise is None else rise * total
    if rise < 1:
        found.warn("lr_scheduler", "the cycle of a warm-up of no step begins with its peak, a step later than there")
    found.set("lr_warmup_fraction", max(rise - 1, 0) / (total - 1))
    found.set("lr_decay_iters", total - 1)
    # 2. Its curve, and the rates at both ends.
    strategy = text(options, "anneal_strategy", "cos", within=KWARGS)
    if strategy not in ("cos", "linear"):
        raise UserError(f"{KWARGS}anneal_strategy={shown(strategy)} must be cos or linear; correct the file")
    style = "linear" if strategy == "linear" else "cosine"
    found.set("lr_warmup_style", style)
    found.set("lr_decay_style", style)
    first, last = (number(options, f"{name}div_factor", within=KWARGS, least=0) for name in ("", "final_"))
    found.set("lr_warmup_init", peak / (first or 25.0), key=f"learning_rate / {KWARGS}div_factor")
    found.set("min_lr", found.settings["lr_warmup_init"] / (last or 1e4))
    # 3. The momentum.
    if options.get("cycle_momentum") is not False:
        for end, name, default in (("min", "base", 0.85), ("max", "max", 0.95)):
            value, key = number(options, f"{name}_momentum", within=KWARGS), f"{KWARGS}{name}_momentum"
            found.set(f"cycle_{end}_momentum", default if value is None else value, key=key)
    if options.get("three_phase"):
        found.warn(f"{KWARGS}three_phase", "the cycle has two phases here")


def _end_of_decay(found: Imported, values: Mapping[str, Any], decay: str) -> None:
    """Learning rate that the decay ends with: 0 in transformers' schedules, except for two forms of the cosine."""
    peak, options = found.settings.get("lr"), section(values, "lr_scheduler_kwargs")
    least, key = None, f"{KWARGS}min_lr"
    if decay == "cosine_with_min_lr":
        least, ratio = number(options, "min_lr", within=KWARGS), number(options, "min_lr_rate", within=KWARGS, least=0)
        if least is None and ratio is not None and peak is not None:
            least, key = ratio * peak, f"learning_rate times {KWARGS}min_lr_rate"
    elif decay == "cosine":
        ratio, key = number(values, "cosine_min_lr_ratio", least=0), "learning_rate times cosine_min_lr_ratio"
        least = None if ratio is None or peak is None else ratio * peak
    found.set("min_lr", least or 0.0, key=key)
    read = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), ONE_CYCLE: OF_ONE_CYCLE}.get(decay, ())
    for key in options.keys() - set(read):
        found.warn(f"{KWARGS}{key}", "it is not there")


KWARGS = "lr_scheduler_kwargs."
DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
ONE_CYCLE = "one_cycle"
OF_ONE_CYCLE = (
    *("pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase"),
    *("cycle_momentum", "base_momentum", "max_momentum"),
)
"""Axolotl's name of torch's OneCycleLR, and its options."""
