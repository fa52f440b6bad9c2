"""Metrics of a step: the table of their names, units and forms in the log, in trackers and in metrics.jsonl.

What an objective reports besides "loss" needs no line here: it is written under its own name everywhere.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

Value = float | int | None


class Metric(NamedTuple):
    """A number of a step under its name in metrics.jsonl; `tag` is the trackers', `console` its part of the log line.

    Tags and parts are Megatron-LM's, for which people have parsers. None: it does not stand there.
    """

    name: str
    unit: str
    tag: str | None = None
    console: Callable[[float], str] | None = None
    in_file: bool = True


def duration(seconds: float) -> str:
    """Time in at most seven characters, in its two largest units: 59s, 3m05s, 2h07m, 12d03h."""
    whole = math.ceil(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def _tflops(value: float) -> str:
    return f"throughput per GPU (TFLOP/s/GPU): {value:.{1 if value >= 1 else 4}f}"


def _loss(tag: str) -> Callable[[float], str]:
    """Part of the log line of a further loss, as Megatron-LM writes it."""
    return lambda value: f"{tag}: {value:.6E}"


EXPERTS_FILE = "experts.jsonl"
"""File of a run folder: tokens of each expert, which are too many for the table that metrics.jsonl is."""
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("step", "steps so far, from 1"),
        Metric("loss", "nats a token", "lm loss", lambda value: f"lm loss: {value:.6E}"),
        Metric("grad_norm", "2-norm before clipping", "grad-norm", lambda value: f"grad norm: {value:.3f}"),
        Metric("learning_rate", "", "learning-rate", lambda value: f"learning rate: {value:.6E}"),
        Metric(
            "decoupled_learning_rate",
            "with --decoupled-lr alone",
            "decoupled-learning-rate",
            lambda value: f"decoupled learning rate: {value:.6E}",
        ),
        # Of models with experts; docs/EXPERTS.md explains them.
        Metric("load_balancing_loss", "1 where the load is even", "load_balancing_loss", _loss("load_balancing_loss")),
        Metric(
            "global_load_balancing_loss",
            "1 where the load is even",
            "global_load_balancing_loss",
            _loss("global_load_balancing_loss"),
        ),
        Metric("router_z_loss", "", "z_loss", _loss("z_loss")),
        Metric("dropped_share", "fraction", "dropped-share", lambda value: f"dropped: {100 * value:.1f}%"),
        Metric(
            "largest_expert_load",
            "times the mean",
            "largest-expert-load",
            lambda value: f"largest expert load: {value:.2f}",
        ),
        Metric("num_idle_experts", "", "idle-experts", lambda value: f"idle experts: {int(value)}"),
        Metric("loss_scale", "", "loss-scale", lambda value: f"loss scale: {value:.1f}"),
        Metric("skipped_iterations", "steps so far"),
        Metric("tokens", "tokens so far"),
        Metric("consumed_samples", "samples so far", None, lambda value: f"consumed samples: {value:12d}"),
        Metric(
            "step_seconds",
            "seconds",
            "iteration-time",
            lambda value: f"elapsed time per iteration (ms): {1000 * value:.1f}",
        ),
        Metric("data_seconds", "seconds", "data-time", lambda value: f"data time (ms): {1000 * value:.1f}"),
        Metric("tokens_per_second", "tokens/s", "tokens-per-second", lambda value: f"tokens per second: {value:.0f}"),
        Metric("model_tflops_per_device", "TFLOP/s", "throughput", _tflops),
        Metric("mfu", "fraction of the peak", "mfu", lambda value: f"MFU: {100 * value:.1f}%"),
        Metric("peak_memory_bytes", "bytes"),
        Metric("world_size", "ranks", "world-size"),
        Metric("params_norm", "2-norm", "params-norm", lambda value: f"params norm: {value:.3f}"),
        Metric("num_zeros", "gradient elements", "num-zeros", lambda value: f"num zeros: {int(value)}"),
        Metric("goodput", "share of the time so far that was training"),
        # These count from one line of the log to the next, or are the config's: not in the file.
        Metric(
            "global_batch_size",
            "samples",
            "batch-size",
            lambda value: f"global batch size: {value:5d}",
            in_file=False,
        ),
        Metric(
            "skipped_since_line",
            "steps",
            None,
            lambda value: f"number of skipped iterations: {value:3d}",
            in_file=False,
        ),
        Metric("nan_since_line", "steps", None, lambda value: f"number of nan iterations: {value:3d}", in_file=False),
        Metric("seconds_left", "seconds", None, lambda value: f"ETA: {duration(value)}", in_file=False),
    )
}

# The order of the log line: Megatron-LM's, what an objective reports after its loss, our own values last.
_BEFORE = (
    "consumed_samples",
    "step_seconds",
    "model_tflops_per_device",
    "learning_rate",
    "decoupled_learning_rate",
    "global_batch_size",
    "loss",
)
_AFTER = (
    "load_balancing_loss",
    "global_load_balancing_loss",
    "router_z_loss",
    "dropped_share",
    "largest_expert_load",
    "num_idle_experts",
    "loss_scale",
    "grad_norm",
    "num_zeros",
    "params_norm",
    "skipped_since_line",
    "nan_since_line",
    "tokens_per_second",
    "mfu",
    "data_seconds",
    "seconds_left",
)


def metric_of(name: str) -> Metric:
    """The entry of the table, or that of a metric which is written under its own name."""
    words = name.replace("_", " ")
    return METRICS.get(name) or Metric(name, "", name.replace("_", "-"), lambda value: f"{words}: {value:.6g}")


def console_parts(values: Mapping[str, Value]) -> list[str]:
    """The parts of the log line, of what has a value."""
    own = [name for name in values if name not in METRICS]
    parts = []
    for name in (*_BEFORE, *own, *_AFTER):
        value, console = values.get(name), metric_of(name).console
        if value is not None and console is not None:
            parts.append(console(value))
    return parts


def points(values: Mapping[str, Value]) -> dict[str, float]:
    """Points of trackers, {tag: value}, of what has a value."""
    tags = {metric_of(name).tag: value for name, value in values.items()}
    return {tag: value for tag, value in tags.items() if tag is not None and value is not None}


def file_line(values: Mapping[str, Value]) -> dict[str, Value]:
    """The object of a line of metrics.jsonl."""
    return {name: value for name, value in values.items() if metric_of(name).in_file}
