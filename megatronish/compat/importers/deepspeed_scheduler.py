"""Section scheduler of DeepSpeed's ds_config.json: learning rate and momentum over the steps, step for step as there.

DeepSpeed moves its scheduler after each step of the optimizer, and the schedulers count from 0 or from 1. So a linear
warm-up, and the decay of WarmupDecayLR, are a step later there than the same lengths mean here; a logarithmic warm-up,
the cosine, OneCycle and LRRangeTest are not. Every step is the same here except for two, which are said: the rate of
the first step of a WarmupCosineLR with a warmup_min_ratio, and the momentum of the first step of a OneCycle.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatronish.compat.importers.imported import AUTO, UNKNOWN, Imported
from megatronish.compat.importers.values import Switches, number_or_auto, section, text, whole
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown

Params = Mapping[str, Any]
SCHEDULER = "scheduler.params."


def scheduler(found: Imported, values: Mapping[str, Any]) -> None:
    """Learning rate over the steps; without a scheduler it stays as it is."""
    kind, params = text(values, "type", within="scheduler."), section(values, "params", within="scheduler.")
    make = SCHEDULERS.get(kind)
    # 1. Where DeepSpeed has no scheduler, the rate is constant from the first step, without warm-up.
    if make is None:
        found.set("lr_decay_style", "constant")
        found.set("lr_warmup_iters", 0)
        if values:
            known = ", ".join(SCHEDULERS)
            found.warn("scheduler", f"{kind} is none of DeepSpeed's ({known}); the learning rate stays constant")
            return
        found.leave_out("scheduler", "there is none in the file, so the learning rate stays; a program may make one")
        return
    # 2. What is "auto" is listed, and nothing is assumed in its place. What is not known may change the curve.
    for key, value in params.items():
        if key not in KNOWN and value is not None:
            found.warn(f"{SCHEDULER}{key}", UNKNOWN)
        if value == "auto":
            flag = SCHEDULER_FLAGS.get(key)
            found.leave_out(f"{SCHEDULER}{key}", f"{AUTO}, as {flag}" if flag else AUTO)
    # 3. The curve.
    make(found, params)


def _warmup(found: Imported, params: Params) -> None:
    """WarmupLR: up to the peak, which stays."""
    found.set("lr_decay_style", "constant")
    if "warmup_max_lr" not in params and found.settings.get("lr") != DEFAULT_PEAK:
        found.warn(f"{SCHEDULER}warmup_max_lr", OLDER_PEAK)
    _peak(found, params, "warmup_max_lr", _number(params, "warmup_max_lr"))
    _rise(found, params)
    _start(found, params)
    _length(found, params)


def _warmup_decay(found: Imported, params: Params) -> None:
    """WarmupDecayLR: up to the peak, and by a line back to where it started."""
    peak, rate = _number(params, "warmup_max_lr"), found.settings.get("lr")
    # Absent, the peak is a number of DeepSpeed's, which silently replaces the optimizer's: that deserves a warning.
    if "warmup_max_lr" not in params:
        peak = DEFAULT_PEAK
        if rate not in (None, peak):
            found.warn(
                "optimizer.params.lr",
                f"the scheduler replaces it by its warmup_max_lr, by default {peak:.15g}; name it",
            )
    _peak(found, params, "warmup_max_lr", peak)
    found.set("lr_decay_style", "linear")
    warmup, total = _rise(found, params), _length(found, params)
    start = _start(found, params)
    if start is not None:
        found.set("min_lr", start, key=f"{SCHEDULER}warmup_min_lr")
    # The decay is a step late: it leaves the peak one step after the warm-up, and ends one step after the run.
    if warmup is not None and total is not None and total > warmup:
        found.set("lr_decay_style", "WSD")
        found.set("lr_wsd_decay_style", "linear")
        found.set("lr_decay_iters", total + 1, key=f"{SCHEDULER}total_num_steps + 1")
        found.set("lr_wsd_decay_iters", total - warmup, key=f"{SCHEDULER}total_num_steps - warmup_num_steps")
    elif "auto" in (params.get("total_num_steps"), params.get("warmup_num_steps")):
        found.warn("scheduler.type", "the decay of WarmupDecayLR is one step later there, which needs its lengths")


def _warmup_cosine(found: Imported, params: Params) -> None:
    """WarmupCosineLR, a factor of the optimizer's rate: its ratios are meant of the peak, and without one unknown."""
    found.set("lr_decay_style", "cosine")
    _rise(found, params)
    _length(found, params)
    peak = found.settings.get("lr")
    first, least = (_number(params, f"{key}_min_ratio", least=0) for key in ("warmup", "cos"))
    if peak is None:
        return
    if params.get("cos_min_ratio") != "auto":
        found.set("min_lr", peak * (0.0001 if least is None else least), key=f"{SCHEDULER}cos_min_ratio times the rate")
    if params.get("warmup_min_ratio") != "auto":
        found.set("lr_warmup_init", peak * (first or 0.0), key=f"{SCHEDULER}warmup_min_ratio times the rate")
        if first:
            found.warn(f"{SCHEDULER}warmup_min_ratio", "the rate of the very first step is 0 there, and this here")


def _one_cycle(found: Imported, params: Params) -> None:
    """OneCycle: a rise and a fall of learning rate and momentum, and a tail."""
    # 1. Its rates, which it has no default for.
    low, high = (_needed(params, f"cycle_{end}_lr", "OneCycle") for end in ("min", "max"))
    _peak(found, params, "cycle_max_lr", high)
    found.set("lr_decay_style", "linear")
    if low is not None:
        for name in ("lr_warmup_init", "min_lr"):
            found.set(name, low, key=f"{SCHEDULER}cycle_min_lr")
    # 2. Its lengths, in steps, and its stairs. The second half is like the first one where nothing is said.
    first, second = (_number(params, f"cycle_{half}_step_size", least=0) for half in ("first", "second"))
    first = DEFAULT_CYCLE_STEPS if first is None else first
    if params.get("cycle_first_step_size") != "auto":
        key = f"{SCHEDULER}cycle_first_step_size"
        found.set("lr_warmup_iters", whole(first, key), key=key)
        total = first + (first if second is None else second)
        if params.get("cycle_second_step_size") != "auto":
            whole(second or 0, f"{SCHEDULER}cycle_second_step_size")
            found.set("lr_decay_iters", int(total), key=f"{SCHEDULER}cycle_first_step_size + cycle_second_step_size")
    stairs, later = (_number(params, f"cycle_{half}_stair_count") for half in ("first", "second"))
    halves = (
        ("warmup", "first", stairs),
        ("decay", "first" if later is None else "second", stairs if later is None else later),
    )
    for name, half, count in halves:
        if count is not None and count > 0:
            key = f"{SCHEDULER}cycle_{half}_stair_count"
            found.set(f"lr_{name}_stairs", whole(count, key), key=key)
    # 3. What follows, per step; an interval of 0 steps is none.
    interval = _number(params, "decay_step_size", least=0) or 0.0
    if interval:
        decay = (_number(params, "decay_lr_rate", least=0) or 0.0) / interval
        found.set("lr_tail_decay", decay, key=f"{SCHEDULER}decay_lr_rate / decay_step_size")
    _momentum(found, params, interval)


def _momentum(found: Imported, params: Params, interval: float) -> None:
    """Momentum of OneCycle: it cycles unless told not to, in optimizers that have betas."""
    if params.get("cycle_momentum") is False:
        return
    if found.settings.get("optimizer", "adam") != "adam":
        found.leave_out(f"{SCHEDULER}cycle_momentum", "DeepSpeed cycles no momentum of an optimizer without betas")
        return
    for end, default in (("min", 0.8), ("max", 0.9)):
        value = _number(params, f"cycle_{end}_mom")
        if params.get(f"cycle_{end}_mom") != "auto":
            found.set(f"cycle_{end}_momentum", default if value is None else value, key=f"{SCHEDULER}cycle_{end}_mom")
    found.set("adam_beta2", CYCLE_BETA2)
    if interval:
        growth = (_number(params, "decay_mom_rate", least=0) or 0.0) / interval
        found.set("momentum_tail_growth", growth, key=f"{SCHEDULER}decay_mom_rate / decay_step_size")
    found.warn(
        f"{SCHEDULER}cycle_momentum",
        "the momentum of the very first step is cycle_min_mom there, and cycle_max_mom here",
    )


def _range_test(found: Imported, params: Params) -> None:
    """LRRangeTest: from the lowest rate up without an end."""
    found.set("lr_decay_style", "range-test")
    found.set("lr_warmup_iters", 0)
    least = _number(params, "lr_range_test_min_lr")
    if params.get("lr_range_test_min_lr") != "auto":
        _peak(found, params, "lr_range_test_min_lr", 0.001 if least is None else least)
    for key, name, default in (("step_rate", "rate", 1.0), ("step_size", "iters", 2000)):
        value = _number(params, f"lr_range_test_{key}")
        if params.get(f"lr_range_test_{key}") != "auto":
            found.set(
                f"lr_range_test_{name}",
                default if value is None else value,
                key=f"{SCHEDULER}lr_range_test_{key}",
            )
    found.set("lr_range_test_staircase", params.get("lr_range_test_staircase") is True)


def _rise(found: Imported, params: Params) -> int | None:
    """Set the warm-up; its steps, or None where they are "auto"."""
    kind = text(params, "warmup_type", "log", within=SCHEDULER)
    found.set("lr_warmup_style", "late-linear" if kind == "linear" else "log")
    if kind not in ("log", "linear"):
        found.leave_out(f"{SCHEDULER}warmup_type", f"{shown(kind)} is none of DeepSpeed's, which takes log")
    if params.get("warmup_num_steps") == "auto":
        return None
    given = _number(params, "warmup_num_steps", least=0)
    steps = DEFAULT_WARMUP_STEPS if given is None else whole(given, f"{SCHEDULER}warmup_num_steps")
    steps = max(steps, 2)  # DeepSpeed's least
    found.set("lr_warmup_iters", steps, key=f"{SCHEDULER}warmup_num_steps")
    return steps


def _start(found: Imported, params: Params) -> float | None:
    """Set the rate that warm-up starts from; None where it is "auto"."""
    if params.get("warmup_min_lr") == "auto":
        return None
    start = _number(params, "warmup_min_lr") or 0.0
    found.set("lr_warmup_init", start, key=f"{SCHEDULER}warmup_min_lr")
    return start


def _length(found: Imported, params: Params) -> int | None:
    """Set the length of the run; None where none is given. A constant rate needs none."""
    total = _number(params, "total_num_steps")
    if total is not None:
        found.set("train_iters", whole(total, f"{SCHEDULER}total_num_steps"), key=f"{SCHEDULER}total_num_steps")
        return found.settings["train_iters"]
    if "total_num_steps" not in params and found.settings["lr_decay_style"] != "constant":
        found.leave_out(f"{SCHEDULER}total_num_steps", "give --train-iters")
    return None


def _peak(found: Imported, params: Params, key: str, peak: float | None) -> None:
    """Set the learning rate by which a scheduler replaces the optimizer's, and Muon's both; `key` is its own."""
    if peak is not None:
        found.set("lr", peak, key=f"{SCHEDULER}{key}" if key in params else None)
        if found.settings.get("optimizer") == "muon":  # matrices have the scheduler's rate, too
            found.set("muon_extra_scale_factor", 1.0)


def _number(params: Params, key: str, *, least: float | None = None) -> float | None:
    """Number of a parameter; None if there is none, or it is "auto"."""
    return number_or_auto(params, key, within=SCHEDULER, least=least)


def _needed(params: Params, key: str, kind: str) -> float | None:
    """Number of a key without a default; None where it is "auto"."""
    value = _number(params, key)
    if value is None and params.get(key) != "auto":
        raise UserError(f"{SCHEDULER}{key} is not given, and {kind} has no default for it; correct the file")
    return value


SCHEDULERS: dict[str, Callable[[Imported, Params], None]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}

SCHEDULER_FLAGS = {
    "warmup_num_steps": "--lr-warmup-iters",
    "warmup_max_lr": "--lr",
    "warmup_min_lr": "--lr-warmup-init",
    "warmup_min_ratio": "--lr-warmup-init",
    "cos_min_ratio": "--min-lr",
    "total_num_steps": "--lr-decay-iters",
    "cycle_min_lr": "--lr-warmup-init and --min-lr",
    "cycle_max_lr": "--lr",
    "cycle_first_step_size": "--lr-warmup-iters",
    "cycle_second_step_size": "--lr-decay-iters, which counts both halves",
    "cycle_first_stair_count": "--lr-warmup-stairs",
    "cycle_second_stair_count": "--lr-decay-stairs",
    "cycle_min_mom": "--cycle-min-momentum",
    "cycle_max_mom": "--cycle-max-momentum",
    "lr_range_test_min_lr": "--lr",
    "lr_range_test_step_rate": "--lr-range-test-rate",
    "lr_range_test_step_size": "--lr-range-test-iters",
}
"""Flags to give where a parameter of the scheduler is "auto"."""

SCHEDULER_SWITCHES: Switches = {"cycle_momentum": (), "lr_range_test_staircase": ()}
"""Parameters that are switches."""
KNOWN = {
    *(*SCHEDULER_FLAGS, *SCHEDULER_SWITCHES, "warmup_type", "decay_step_size", "decay_lr_rate", "decay_mom_rate"),
    "last_batch_iteration",
}
"""Parameters of any scheduler."""

OLDER_PEAK = "none given is the optimizer's rate since DeepSpeed 0.17.2, and 0.001 before: for that add --lr 0.001"
DEFAULT_WARMUP_STEPS = 1000
DEFAULT_PEAK = 0.001
DEFAULT_CYCLE_STEPS = 2000
"""What a scheduler means that does not name its warmup_num_steps, a WarmupDecayLR its warmup_max_lr, a OneCycle its
cycle_first_step_size."""
CYCLE_BETA2 = 0.99
"""Adam's beta2 while OneCycle cycles its momentum: it sets both betas, and no key names this one."""
